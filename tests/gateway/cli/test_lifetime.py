"""Signals and the order of a stop, with real signals to a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.arch.source import ROOT

PROGRAM = """
import asyncio, sys
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from gateway.cli.lifetime import run
from gateway.cli.listener import Listener, bind, url_of

drain_s, failing = float(sys.argv[1]), sys.argv[2]

class Service:
    draining = False
    def note(self, word): print(word, flush=True)
    async def start(self):
        self.note("start")
        if failing == "start": raise RuntimeError("no start")
        if failing == "slow": await asyncio.sleep(60)
    async def drain(self):
        self.draining = True
        self.note("drain")
        await asyncio.sleep(drain_s)
    async def stop(self):
        self.note("stop")
        if failing == "stop":
            import time
            time.sleep(60)
    async def reload(self):
        self.note("reload")
        if failing == "reload": raise RuntimeError("bad file")

service = Service()
async def ready(request): return JSONResponse({"draining": service.draining})
bound = bind("127.0.0.1", 0, "listen")
url = url_of(bound)
listener = Listener(Starlette(routes=[Route("/", ready)]), bound)
forced = lambda: print("forced", flush=True)
sys.exit(asyncio.run(run(service, [listener], lambda: print(url, flush=True), forced)))
"""


@contextmanager
def running(drain_s: float = 0.0, failing: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(drain_s), failing],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_stops_and_exits_0(number: signal.Signals) -> None:
    """uvicorn would raise the signal again and the process would end by it."""
    with running() as process:
        assert line(process).startswith("http://127.0.0.1:")
        assert line(process) == "start"
        process.send_signal(number)
        assert [line(process), line(process)] == ["drain", "stop"]
        assert process.wait(30) == 0


def test_the_listener_answers_while_draining() -> None:
    """security 83: readiness must be readable as 503 during the drain, not as a refused connection."""
    with running(drain_s=60) as process:
        url = line(process)
        assert line(process) == "start"
        assert httpx.get(url, timeout=30).json() == {"draining": False}
        process.send_signal(signal.SIGTERM)
        assert line(process) == "drain"
        assert httpx.get(url, timeout=30).json() == {"draining": True}
        process.send_signal(signal.SIGINT)
        assert line(process) == "stop"
        assert process.wait(30) == 130


def test_a_second_signal_ends_even_what_does_not_stop() -> None:
    """A worker that is slow to go, a collector that does not answer, an event loop that is stuck."""
    with running(drain_s=60, failing="stop") as process:
        line(process)
        assert line(process) == "start"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "drain"
        process.send_signal(signal.SIGTERM)
        assert [line(process), line(process)] == ["stop", "forced"]
        assert process.wait(30) == 130


def test_a_slow_start_can_be_stopped() -> None:
    with running(failing="slow") as process:
        line(process)
        assert line(process) == "start"
        process.send_signal(signal.SIGTERM)
        assert [line(process), line(process)] == ["drain", "stop"]
        assert process.wait(30) == 0


def test_a_failed_start_stops_what_it_started() -> None:
    with running(failing="start") as process:
        line(process)
        assert [line(process), line(process)] == ["start", "stop"]
        assert process.wait(30) == 1


@pytest.mark.parametrize(("failing", "said"), [("", "Reloaded."), ("reload", "nothing changed: bad file")])
def test_hangup_reloads_and_the_process_lives_on(failing: str, said: str) -> None:
    with running(failing=failing) as process:
        line(process)
        assert line(process) == "start"
        process.send_signal(signal.SIGHUP)
        assert line(process) == "reload"
        assert process.stderr is not None
        assert said in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert line(process) == "drain"
        assert process.wait(30) == 0
