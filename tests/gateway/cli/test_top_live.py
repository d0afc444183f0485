"""``forebay top`` as people see it: the real loop in a terminal of its own, beside a gateway that works and stops."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from tests.arch.source import ROOT
from tests.gateway.conftest import Start
from tests.gateway.harness import tickets, until
from workers.testing import Echo

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
"""The alternate screen, and the cursor."""
RUN = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("gateway.cli", run_name="__main__", alter_sys=True)
"""
"""A suite that runs in the background of a shell has Ctrl-C ignored, and what it starts inherits that."""


class Terminal:
    """What a program wrote to its terminal so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.written = b""

    @property
    def frame(self) -> str:
        """The text since the cursor last went home: the frame that is drawn or was drawn last."""
        last = self.written.rpartition(b"\x1b[H")[2]
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last.decode(errors="replace"))

    async def shows(self, wanted: Callable[[str], bool], what: str) -> None:
        """Wait until a frame satisfies ``wanted``."""
        try:
            await until(lambda: wanted(self.frame), what, timeout_s=30)
        except AssertionError as error:
            raise AssertionError(f"{error}; the terminal has: {self.frame}") from None


@asynccontextmanager
async def terminal(*words: str, columns: int = 120, rows: int = 40) -> AsyncIterator[Terminal]:
    """``forebay`` in a pseudo-terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "FOREBAY_ADMIN_TOKEN": "t"}
    environment.pop("COLUMNS", None)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, *words), cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    os.set_blocking(master, False)
    screen = Terminal(process)
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            screen.written += os.read(master, 65536)
        except BlockingIOError:
            return
        except OSError:  # the other end is closed
            loop.remove_reader(master)

    loop.add_reader(master, read)
    try:
        yield screen
    finally:
        loop.remove_reader(master)
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(master)


def figure(frame: str, name: str) -> int | None:
    """The number below a heading of the first line of figures."""
    lines = frame.splitlines()
    for heads, values in itertools.pairwise(lines):
        at = heads.find(name)
        if at >= 0 and (found := re.match(r"\s*([\d,]+)", values[at:])):
            return int(found[1].replace(",", ""))
    return None


async def test_figures_change_while_one_looks_and_ctrl_c_leaves_a_clean_terminal(start: Start) -> None:
    async with (
        start({}, echo=Echo(step_s=0.02), env={"FOREBAY_ADMIN_TOKEN": "t"}) as site,
        terminal("top", "--interval", "0.2", "--url", site.admin_url) as top,
    ):
        await top.shows(lambda frame: figure(frame, "running") == 0, "an idle gateway")
        assert ENTER in top.written
        assert HIDE in top.written
        call = asyncio.create_task(site.complete(max_tokens=3000))
        await until(lambda: any(ticket.first_token_at for ticket in tickets(site)), "it runs")
        await top.shows(lambda frame: figure(frame, "running") == 1, "the request that runs")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await top.shows(lambda frame: figure(frame, "running") == 0, "that it is gone")
        assert LEAVE not in top.written
        top.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(top.process.wait(), 30) == 0
        await until(lambda: SHOW in top.written and LEAVE in top.written, "the terminal as it was")
        assert b"Traceback" not in top.written
        assert b"Aborted" not in top.written


async def test_a_gateway_that_stops_leaves_its_last_figures_marked_as_old(start: Start) -> None:
    gateway = AsyncExitStack()
    site = await gateway.enter_async_context(start({}, env={"FOREBAY_ADMIN_TOKEN": "t"}))
    async with gateway, terminal("top", "--interval", "0.2", "--url", site.admin_url) as top:
        await top.shows(lambda frame: "1 of 1 workers" in frame, "a ready gateway")
        await gateway.aclose()
        await top.shows(lambda frame: "figures are old" in frame and "alpha" in frame, "old figures")
        assert top.process.returncode is None
