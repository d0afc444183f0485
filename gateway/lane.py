"""Long work of the gateway's own (tokenising, templates): threads that leave the event loop its place, in fair order.

Rules
- Short work runs at once, on the event loop: handing it over costs more than it does.
- Long work waits for a thread. Tenants take turns by what their work costs over their weight (start-time fair queueing,
  Goyal et al. 1996): a tenant's flood of long prompts waits behind itself, and nobody else's prompt behind all of it.
- Everything but ``work`` itself happens on the event loop: the line has one writer.
- Work whose caller has gone is dropped while it waits; what runs is finished.
- The threads leave a core to the event loop, and give way to it where they share one (``ASIDE``; Linux). None keeps the
  interpreter lock for long while the loop wants it (``hand_over_soon``): the loop takes it anew for every callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any, TypeVar

from workers.tokenizer import INLINE_CHARS

ASIDE = 5
"""How much nicer (``nice(2)``) the threads are than the event loop: a third of its share where both want one core. Not
more: a thread that holds the interpreter lock and gets no core would keep the loop from going on."""
MOST_THREADS = 4
MOST_OWNERS = 1024
"""Above so many, those are forgotten that have nothing in the line."""
SWITCH_S = 0.0005
"""After so long a thread hands over the interpreter lock to one that wants it; Python's own is 5 ms."""

T = TypeVar("T")


def spare_cores() -> int:
    """Threads for long work: the cores that this process may use but one, at most ``MOST_THREADS``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores - 1))


def hand_over_soon() -> None:
    """For this process from now on: no thread of it holds up the event loop for longer than ``SWITCH_S`` at a time."""
    sys.setswitchinterval(SWITCH_S)


@dataclass(slots=True, eq=False)
class _Turn:
    """Work that waits."""

    owner: str
    work: Callable[[], Any] | None
    """None: nobody wants it any more."""
    result: asyncio.Future[Any]
    begun: bool = False


class Lane:
    """A line in front of a few threads. Belongs to the event loop."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_step_aside)
        self._all = self._free = threads
        self._line: list[tuple[float, int, _Turn]] = []
        """A heap by the virtual time at which each begins, then by arrival."""
        self._count = 0
        self._now = 0.0
        """Virtual time: the start of what was begun last."""
        self._ends: dict[str, float] = {}
        """Per owner, the virtual time at which all of its work so far ends."""
        self._most = MOST_OWNERS

    def __len__(self) -> int:
        """How much waits."""
        return sum(turn.work is not None for _, _, turn in self._line)

    async def run(self, owner: str, cost: int, work: Callable[[], T], *, weight: float = 1.0) -> T:
        """What ``work`` returns or raises. ``cost``: about what it takes, in characters of encoding."""
        if cost <= INLINE_CHARS:
            return work()
        turn = _Turn(owner, work, asyncio.get_running_loop().create_future())
        start = max(self._now, self._ends.get(owner, 0.0))
        self._ends[owner] = start + cost / weight
        self._count += 1
        heappush(self._line, (start, self._count, turn))
        if len(self._ends) > self._most:
            self._forget()
        self._fill()
        try:
            result: T = await turn.result
        finally:
            turn.work = None  # it holds the prompt
            if not turn.begun and owner in self._ends:
                self._ends[owner] -= cost / weight
        return result

    async def close(self) -> None:
        """End the threads; what runs is finished first, what waits is cancelled."""
        while self._line:
            heappop(self._line)[2].result.cancel()
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _forget(self) -> None:
        """Forget whose work is done. So seldom that it costs each of them next to nothing."""
        waiting = {turn.owner for _, _, turn in self._line}
        self._ends = {owner: end for owner, end in self._ends.items() if owner in waiting}
        self._most = MOST_OWNERS + 2 * len(self._ends)

    def _fill(self) -> None:
        """Begin what has a thread."""
        while self._free and self._line:
            start, _, turn = heappop(self._line)
            if turn.work is None:
                continue
            self._now = start
            self._free -= 1
            turn.begun = True
            running = asyncio.get_running_loop().run_in_executor(self._threads, turn.work)
            running.add_done_callback(partial(self._ended, turn))
        if not self._line and self._free == self._all:
            self._now = 0.0
            self._ends.clear()

    def _ended(self, turn: _Turn, done: asyncio.Future[Any]) -> None:
        self._free += 1
        self._fill()
        if turn.result.done():
            if not done.cancelled():
                done.exception()  # looked at, so that nobody warns of it
        elif done.cancelled():
            turn.result.cancel()
        elif (error := done.exception()) is not None:
            turn.result.set_exception(error)
        else:
            turn.result.set_result(done.result())


def _step_aside() -> None:
    """Called by each thread: nobody minds where the system has no niceness per thread, or does not allow it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + ASIDE)
