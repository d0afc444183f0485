"""Child processes: told through a pipe, logged within bounds, ended for sure."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workers.launchers import local
from workers.launchers.base import LaunchContext, LaunchError, WorkerProcess, WorkerSpec
from workers.launchers.local import LocalLauncher

pytestmark = pytest.mark.timeout(60)
SPEC = WorkerSpec("m/p-0", 0, "m", "source", env={"OTEL_TRACES_EXPORTER": "none"})
READ = "import sys, json, os, time, signal; spec = json.loads(sys.stdin.readline());"


async def run(code: str, lines: list[tuple[str, str]] | None = None) -> WorkerProcess:
    sink = (lambda name, line: lines.append((name, line))) if lines is not None else None
    return await LocalLauncher(LaunchContext(log=sink), (sys.executable, "-c", READ + code)).start(SPEC)


async def test_a_child_is_told_everything_through_the_pipe_and_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FOREBAY_JWT_KEY", "the gateway's own")
    monkeypatch.setenv("FOREBAY_CACHE", "/somewhere")
    lines: list[tuple[str, str]] = []
    worker = await run("print(json.dumps(spec), file=sys.stderr); time.sleep(60)", lines)
    async with asyncio.timeout(30):
        while not lines:
            await asyncio.sleep(0.01)
    secret = worker.secret
    assert secret is not None
    [(name, line)] = lines
    assert name == "m/p-0"
    assert secret in line, "it was told"
    assert len(secret) >= 32
    for part in ("cmdline", "environ"):
        assert secret.encode() not in Path(f"/proc/{worker.pid}/{part}").read_bytes()
    environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
    assert b"OTEL_TRACES_EXPORTER=none" in environment
    assert b"FOREBAY_CACHE=/somewhere" in environment
    assert b"the gateway's own" not in environment
    folder = Path(worker.address.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.getsid(worker.pid or 0) == worker.pid, "Ctrl-C must not reach it"
    await worker.stop(0)
    assert not folder.exists()


async def test_how_it_ended_is_told_with_its_last_words() -> None:
    worker = await run("[print('line', n, file=sys.stderr) for n in range(50)]; sys.exit(7)")
    ended = await worker.wait()
    assert (ended.exit_code, ended.signal) == (7, None)
    assert ended.last_words.splitlines()[-1] == "line 49"
    assert len(ended.last_words.splitlines()) == local.LAST_LINES
    await worker.stop(1)
    worker = await run("os.kill(os.getpid(), signal.SIGSEGV)")
    ended = await worker.wait()
    assert (ended.exit_code, ended.signal) == (None, signal.SIGSEGV)
    assert (await worker.wait()).signal == signal.SIGSEGV
    await worker.stop(1)


async def test_a_flood_of_log_is_cut_and_does_not_block_the_child() -> None:
    lines: list[tuple[str, str]] = []
    code = (
        "[print('x' * 200, file=sys.stderr) for n in range(20000)]; sys.stderr.write('y' * 3000000 + chr(10));"
        "time.sleep(1.1); print('after', file=sys.stderr); print('last', file=sys.stderr)"
    )
    worker = await run(code, lines)
    ended = await worker.wait()
    assert ended.exit_code == 0
    assert len(lines) < 20000 / 2
    assert max(len(line) for _, line in lines) <= local.MAX_LINE
    assert any("log_lines_dropped" in line for _, line in lines)
    assert lines[-1] == ("m/p-0", "last")
    await worker.stop(1)


async def test_a_child_that_ends_on_sigterm_is_not_killed() -> None:
    lines: list[tuple[str, str]] = []
    code = (
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(0)); print('up', file=sys.stderr, flush=True);time.sleep(60)"
    )
    worker = await run(code, lines)
    async with asyncio.timeout(30):
        while not lines:
            await asyncio.sleep(0.01)
    await worker.stop(20)
    assert (await worker.wait()).exit_code == 0


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    lines: list[tuple[str, str]] = []
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', file=sys.stderr, flush=True); time.sleep(60)"
    worker = await run(code, lines)
    async with asyncio.timeout(30):
        while not lines:
            await asyncio.sleep(0.01)
    await worker.stop(0.1)
    assert (await worker.wait()).signal == signal.SIGKILL
    await worker.stop(0.1)


async def test_a_program_that_is_not_there_is_a_launch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may be too long for a socket's path
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(LaunchError, match="cannot start /nowhere"):
            await LocalLauncher(LaunchContext(), ("/nowhere",)).start(SPEC)
        assert list(Path(folder).iterdir()) == []


async def test_a_folder_too_deep_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(LaunchError, match="set TMPDIR"):
        await LocalLauncher(LaunchContext()).start(SPEC)


def test_sockets_of_dead_gateways_are_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, live, other = (
        tmp_path / name
        for name in (f"forebay-worker-{gone.pid}-a", f"forebay-worker-{os.getpid()}-b", "forebay-worker-x-c")
    )
    for folder in (dead, live, other):
        folder.mkdir()
    LocalLauncher(LaunchContext())
    assert [folder.exists() for folder in (dead, live, other)] == [False, True, True]
