"""Rank 0's other ranks: child processes, started, told what to do, watched, and ended with it.

Rules
- A rank ends when rank 0's process does, however it does (``lifeline.py``), and when ``Ranks`` is closed or forgotten.
- One that ends before that, or does not read what it is told, takes all with it: RunnerGoneError here, and ``watch``
  calls. Nobody tries to go on without it.
- Linux ends a process with the *thread* that started it, so a thread does that which stays for as long (``_Keeper``).
- The loading thread talks to them first, then the thread that runs steps, and no other.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from workers.engine.plan import RunnerGoneError
from workers.model.parallel import messages
from workers.model.parallel.messages import Channel, Down, Failed, Up

A = TypeVar("A", bound=Up)
SETTINGS = "engine.tensor_parallel and pipeline_parallel"
"""What an error of several devices is about, where it is about nothing smaller."""
END_S = 2.0
"""A rank that has not ended so many seconds after it was let go is killed."""
POLL_S = 0.1
"""How soon the end of a rank is noticed while nobody computes."""


class RankProcess(Protocol):
    """What ``subprocess.Popen`` is of."""

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        ...


def spawn(theirs: socket.socket, threads: int) -> RankProcess:
    """Start a process that serves ``theirs`` and ends with this one and with this thread."""
    descriptor = theirs.fileno()
    return subprocess.Popen(  # noqa: S603 - this interpreter and our own module
        [sys.executable, "-m", "workers.model.parallel.rank", str(descriptor), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )


class _Keeper:
    """Starts the ranks and waits until one ends or ``leave``."""

    def __init__(self, count: int, threads: int) -> None:
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self.channels: list[Channel] = []
        self.processes: list[RankProcess] = []
        self._count, self._threads = count, threads
        self._spawned = threading.Event()
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._lost = self._leaving = False
        self._callers: list[Callable[[], None]] = []
        self._leave, self._left = socket.socketpair()

    def begin(self) -> None:
        """Start thread and ranks. Raises OSError."""
        self._thread.start()
        self._spawned.wait()
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Ends are meant from now on."""
        with self._lock:
            self._leaving = True
        self._leave.close()

    def watch(self, lost: Callable[[], None]) -> None:
        """Have ``lost`` called when a rank ends, at once if one has."""
        with self._lock:
            if not self._lost:
                self._callers.append(lost)
                return
        lost()

    def _run(self) -> None:
        try:
            for _ in range(self._count):
                ours, theirs = socket.socketpair()
                with theirs:
                    self.channels.append(Channel(ours))
                    self.processes.append(spawn(theirs, self._threads))
        except Exception as error:
            self._failure = error
        finally:
            self._spawned.set()
        if self._failure is None:
            self._wait()
        self._left.close()

    def _wait(self) -> None:
        while all(process.poll() is None for process in self.processes):
            if select.select([self._left], [], [], POLL_S)[0]:
                return
        with self._lock:
            if self._leaving:
                return
            self._lost = True
        for call in self._callers:
            call()


class Ranks:
    """All ranks but 0, in order. Raises OSError when a process cannot be started."""

    def __init__(self, count: int, threads: int, timeout_s: float) -> None:
        """``count``: of the others. ``timeout_s``: how long one may take to read a message."""
        self._timeout_s = timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="forebay-ranks-"))
        """For the file through which the ranks find each other; nobody else can look into it."""
        self._keeper = _Keeper(count, threads)
        self._channels, self._processes = self._keeper.channels, self._keeper.processes
        self._last: list[Callable[[], None]] = []
        self.close = weakref.finalize(self, _end, self._keeper, self._last, self.folder)
        """End them all; idempotent."""
        try:
            self._keeper.begin()
        except BaseException:
            self.close()
            raise

    def joined(self) -> None:
        """The ranks have found each other for good: the folder has done its work (a killed worker would leave it)."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when all have ended; it must not hold this object."""
        self._last.append(call)

    @property
    def alive(self) -> int:
        """Ranks that run, rank 0 among them."""
        return 1 + sum(process.poll() is None for process in self._processes)

    def tell(self, message: Down) -> None:
        """Tell all the same. Raises RunnerGoneError."""
        self.tell_each([message] * len(self._channels))

    def tell_each(self, wanted: Sequence[Down]) -> None:
        """Tell each its own. Raises RunnerGoneError."""
        frame, encoded = None, b""
        for rank, (channel, message) in enumerate(zip(self._channels, wanted, strict=True), 1):
            if message is not frame:
                frame, encoded = message, messages.encode(message)
            try:
                channel.send(encoded, self._timeout_s)
            except OSError as error:
                raise RunnerGoneError(f"rank {rank} ended or does not listen") from error

    def answers(self, kind: type[A]) -> list[A]:
        """What every rank answers while it starts. Raises ValueError with what one says is wrong, or that it ended."""
        return [self._answer(rank, channel, kind) for rank, channel in enumerate(self._channels, 1)]

    def blame(self, kind: type[A]) -> None:
        """Raise ValueError with what one says is wrong, where one says so within ``END_S`` instead of ``kind``."""
        spoke, _, _ = select.select(self._channels, [], [], END_S)
        for rank, channel in enumerate(self._channels, 1):
            if channel in spoke:
                self._answer(rank, channel, kind)

    def watch(self, lost: Callable[[], None]) -> None:
        """Have ``lost`` called, on a thread of its own, as soon as a rank ends that was not let go."""
        self._keeper.watch(lost)

    @staticmethod
    def _answer(rank: int, channel: Channel, kind: type[A]) -> A:
        said: Up | None = channel.up()
        if isinstance(said, kind):
            return said
        if isinstance(said, Failed) and said.error.startswith("engine."):
            raise ValueError(f"{said.error} (says rank {rank})")
        why = f"says {said.error}" if isinstance(said, Failed) else "ended while it started; log lines before say why"
        raise ValueError(f"{SETTINGS}: rank {rank} {why}")


def _end(keeper: _Keeper, last: list[Callable[[], None]], folder: Path) -> None:
    keeper.leave()
    for channel in keeper.channels:
        channel.close()
    until = time.monotonic() + END_S
    for process in keeper.processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if isinstance(process, subprocess.Popen) and process.stdin is not None:
            process.stdin.close()
    for call in last:
        call()
    shutil.rmtree(folder, ignore_errors=True)
