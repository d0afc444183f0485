"""Echo workers forked from a process that has everything loaded: a start costs a tenth of a new interpreter's.

Each is a real process with its own session, pipes and exit code, as ``LocalLauncher`` wants it; what starts an
interpreter is tested where that is the point (``tests/workers/launchers``, ``tests/e2e``).

``python -m tests.forked FD`` is that process: alone, without threads, and gone with the one that started it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from workers.launchers.base import LaunchContext
from workers.launchers.local import MAX_LINE, LocalLauncher
from workers.testing import Echo, flags, main

_LENGTH = struct.Struct("!I")
_CODE = struct.Struct("!i")
_FDS = 3


class ForkedLauncher(LocalLauncher):
    """A ``LocalLauncher`` of echo workers."""

    def __init__(self, context: LaunchContext | None = None, echo: Echo | None = None) -> None:
        super().__init__(context or LaunchContext(), command=("forked", *flags(echo)))

    async def _spawn(self, env: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, int]:
        home = _Home.get()
        stdin, stderr, code = os.pipe(), os.pipe(), os.pipe()
        try:
            pid = home.fork(list(self._command[1:]), env, (stdin[0], stderr[1], code[1]))
        finally:
            for fd in (stdin[0], stderr[1], code[1]):
                os.close(fd)
        try:
            process = await _Process.of(pid, stdin[1], stderr[0], code[0])
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            for fd in (stdin[1], code[0]):
                os.close(fd)
            raise
        return cast("asyncio.subprocess.Process", process), home.pid


class _Stdin:
    """What it needs of a ``StreamWriter``: a pipe has room for the one line that a worker is told."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "wb", 0)

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone already: wait() says how
            self._file.write(data)

    async def drain(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """What the worker takes for the end of its gateway."""
        self._file.close()

    async def wait_closed(self) -> None:
        """It is."""


class _Process:
    """What ``LocalWorker`` needs of ``asyncio.subprocess.Process``."""

    def __init__(self, pid: int, stdin: int, stderr: asyncio.StreamReader, code: int) -> None:
        self.pid = pid
        self.stdin = _Stdin(stdin)
        self.stderr = stderr
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._code = code
        self._loop.add_reader(code, self._end)

    @classmethod
    async def of(cls, pid: int, stdin: int, stderr: int, code: int) -> _Process:
        """The process whose pipes these are."""
        reader = asyncio.StreamReader(limit=MAX_LINE)
        from_it = os.fdopen(stderr, "rb", 0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), from_it)
        return cls(pid, stdin, reader, code)

    async def wait(self) -> int:
        """Its exit code; minus the signal that ended it."""
        return int(await asyncio.shield(self._ended))

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError when it is gone."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def _end(self) -> None:
        told = os.read(self._code, _CODE.size)
        self._loop.remove_reader(self._code)
        os.close(self._code)
        self.stdin.close()
        self.returncode = _CODE.unpack(told)[0] if told else -signal.SIGKILL
        if not self._ended.done():
            self._ended.set_result(self.returncode)


class _Home:
    """The process that forks, as its user sees it: one per process, made when first needed."""

    _known: _Home | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._socket = ours
        self.pid = self._process.pid
        atexit.register(self._close)

    @classmethod
    def get(cls) -> _Home:
        """The one of this process."""
        with cls._lock:
            if cls._known is None:
                cls._known = cls()
            return cls._known

    def fork(self, arguments: list[str], env: Mapping[str, str], fds: tuple[int, int, int]) -> int:
        """A worker's process id. ``fds``: its standard input and error, and where its exit code goes."""
        request = json.dumps([arguments, dict(env)]).encode()
        with self._lock:
            socket.send_fds(self._socket, [_LENGTH.pack(len(request))], fds)
            self._socket.sendall(request)
            return int(_LENGTH.unpack(_exactly(self._socket, _LENGTH.size))[0])

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise ConnectionError
        data += part
    return data


# -- the process that forks --------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> int:
    """Fork whatever is asked for until the other end is gone. Returns the exit code, in a child that of the worker."""
    import workers.telemetry  # noqa: F401 - loaded for the children

    codes: dict[int, int] = {}
    wakeup, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == wakeup:
                os.read(wakeup, 4096)
                _reap(codes)
                continue
            head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, _FDS)
            if not head:
                return 0
            arguments, env = json.loads(_exactly(connection, _LENGTH.unpack(head)[0]))
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.close()
                for other in (wakeup, signalled, *codes.values(), fds[2]):
                    os.close(other)
                return _become(arguments, env, fds[0], fds[1])
            codes[pid] = fds[2]
            os.close(fds[0])
            os.close(fds[1])
            connection.sendall(_LENGTH.pack(pid))


def _reap(codes: dict[int, int]) -> None:
    while codes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        fd = codes.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(fd, _CODE.pack(os.waitstatus_to_exitcode(status)))
        os.close(fd)


def _become(arguments: list[str], env: dict[str, str], stdin: int, stderr: int) -> int:
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    for ours, standard in ((stdin, 0), (null, 1), (stderr, 2)):
        os.dup2(ours, standard)
        os.close(ours)
    os.environ.clear()
    os.environ.update(env)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
