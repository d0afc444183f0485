"""Workers as child processes of this gateway: ``launch: {use: local, count: 1}``.

Rules
- The address is a UNIX socket in a new directory that only this user can enter, and there is a random secret besides.
- What the child has to know (address, secret, model, engine settings) goes through its standard input as one JSON line:
  neither the command line nor the environment shows it. The pipe then stays open; its end tells the child that this
  process is gone, however it went.
  The gateway's own keys are taken out of the environment that the child inherits.
- The child has a process group of its own, so that Ctrl-C reaches the gateway alone, which then drains.
- Its log is relayed line by line, cut at ``MAX_LINE`` bytes and ``MAX_LINES_S`` lines per second; a flood of it never
  blocks the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from workers.host import preload
from workers.launchers.base import LaunchContext, LaunchError, LogSink, WorkerExit, WorkerProcess, WorkerSpec

MAX_LINE = 16 * 1024
MAX_LINES_S = 200
LAST_LINES = 8
_MAX_SOCKET_PATH = 100
_OWN_KEY = re.compile(r"FOREBAY_\w*(KEY|TOKEN|SECRET)")
_PREFIX = "forebay-worker-"


class LocalLauncher:
    """Starts ``python -m workers.main`` (or another program that reads the same line) per worker."""

    def __init__(self, context: LaunchContext, command: Sequence[str] | None = None) -> None:
        """``command``: the program; default is this interpreter with ``-m workers.main --spec-stdin``."""
        _sweep(Path(tempfile.gettempdir()))
        self._log = context.log
        self._env = context.env
        self._command = tuple(command or (sys.executable, "-m", "workers.main", "--spec-stdin"))

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start the process; it loads its model by itself. Raises LaunchError."""
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        worker: LocalWorker | None = None
        try:
            socket = folder / "w.sock"
            if len(str(socket)) > _MAX_SOCKET_PATH:
                raise LaunchError(f"the path {socket} is too long for a socket: set TMPDIR to a shorter folder")
            secret = secrets.token_urlsafe(32)
            try:
                process, parent = await self._spawn(self._environment(spec))
            except OSError as error:
                raise LaunchError(f"cannot start {self._command[0]}: {error.strerror}") from error
            line = spec_line(spec, f"unix:{socket}", secret, parent)
            worker = LocalWorker(spec.name, process, folder, f"unix:{socket}", secret, self._log)
            assert process.stdin is not None
            process.stdin.write(line)
            with contextlib.suppress(ConnectionError):  # it is gone already: wait() says how
                await process.stdin.drain()
        except BaseException:
            if worker is not None:
                await worker.stop(0.0)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return worker

    async def _spawn(self, env: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, int]:
        """A new process that waits for its line, in a session of its own, and whose child it is. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=MAX_LINE,
            env=env,
        )
        return process, os.getpid()

    def _environment(self, spec: WorkerSpec) -> dict[str, str]:
        """What the child inherits, with the allocator that ``engine.allocator`` asks for. Raises LaunchError."""
        env = {**harmless({**os.environ, **self._env}), **spec.env}
        try:
            return {**env, **preload(spec.engine.allocator, env)}
        except ValueError as error:
            raise LaunchError(f"{spec.place}.{error}" if spec.place else str(error)) from None


def spec_line(spec: WorkerSpec, address: str, secret: str | None, parent_pid: int | None) -> bytes:
    """What a worker reads from its standard input: one line of JSON (``workers.main`` has the model)."""
    return (
        msgspec.json.encode(
            {
                "address": address,
                "secret": secret,
                "parent_pid": parent_pid,
                "name": spec.name,
                "model": spec.model,
                "source": spec.source,
                "engine": spec.engine.model_dump(mode="json"),
                "base_dir": spec.base_dir,
                "architectures": dict(spec.architectures),
                "place": spec.place,
            }
        )
        + b"\n"
    )


class LocalWorker:
    """A child process."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        folder: Path,
        address: str,
        secret: str,
        log: LogSink | None,
    ) -> None:
        self.address = address
        self.secret = secret
        self._name = name
        self._process = process
        self._folder = folder
        self._log = log
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._relay = asyncio.create_task(self._relay_log())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def wait(self) -> WorkerExit:
        """Return when the process has ended, with its last log lines."""
        code = await self._process.wait()
        await asyncio.wait({self._relay}, timeout=0.2)
        last_words = "\n".join(self._last)
        return WorkerExit(signal=-code, last_words=last_words) if code < 0 else WorkerExit(code, last_words=last_words)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, after ``grace_s`` SIGKILL; then remove the socket."""
        try:
            if grace_s > 0 and self._signal(signal.SIGTERM):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace_s)
        finally:
            self._signal(signal.SIGKILL)
            await self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
                with contextlib.suppress(ConnectionError):
                    await self._process.stdin.wait_closed()
            await asyncio.wait({self._relay}, timeout=0.5)
            self._relay.cancel()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> bool:
        if self._process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return True

    async def _relay_log(self) -> None:
        """Pass the child's lines on; what is too much is dropped and counted, never left in the pipe."""
        stream = self._process.stderr
        assert stream is not None
        second, lines, dropped = 0.0, 0, 0
        while line := await _read_line(stream):
            text = line.decode("utf-8", "replace").rstrip()
            self._last.append(text[:1000])
            now = time.monotonic()
            if now - second >= 1.0:
                if dropped and self._log is not None:
                    self._log(self._name, f'{{"event": "log_lines_dropped", "lines": {dropped}}}')
                second, lines, dropped = now, 0, 0
            lines += 1
            if lines > MAX_LINES_S:
                dropped += 1
            elif self._log is not None and text:
                self._log(self._name, text)


def harmless(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without this gateway's own keys (``FOREBAY_JWT_KEY`` …): a worker has no use for them."""
    return {name: value for name, value in env.items() if not _OWN_KEY.fullmatch(name)}


def _sweep(folder: Path) -> None:
    """Remove the sockets that gateways left behind that were killed."""
    for path in folder.glob(f"{_PREFIX}[0-9]*-*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if owner.isdigit() and not Path(f"/proc/{owner}").exists() and path.stat().st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, cut where it is longer than the stream's limit; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(max(1, error.consumed))
