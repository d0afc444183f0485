"""Ending a request from outside, wherever it waits: its caller has gone, its time is up, or it does not read.

Like ``asyncio.timeout``, but whoever ends the block says with which error. The block runs in the request's own task:
one beside it, to be cancelled from here, would cost every request a task and two turns of the event loop.

Rules
- The first word counts. One that comes before the block or after it is ignored.
- A cancellation by somebody else passes through as such, also when both come at once.
- Only to be called from the event loop's callbacks, not by the request itself: that one can raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class Cut:
    """A block, and the means to end it."""

    __slots__ = ("_before", "_task", "_why")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        self._why: Exception | None = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._before = self._task.cancelling()

    def __call__(self, why: Exception) -> None:
        """End the block with ``why``."""
        if self._task is not None and self._why is None:
            self._why = why
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._why is None:
            return
        if task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError):
            raise self._why from None


class Deadline:
    """A timer that is set again by whom it wakes: several time limits of a block, one of which is always next."""

    __slots__ = ("_at", "_clock", "_due", "_loop", "_timer")

    def __init__(self, clock: Callable[[], float], at: float, due: Callable[[float], float | None]) -> None:
        """``due(now)`` is called at ``at`` by ``clock``; it returns when to be called again, or None."""
        self._clock = clock
        self._due = due
        self._loop = asyncio.get_running_loop()
        self._set(at)

    def stop(self) -> None:
        """The block has ended."""
        self._timer.cancel()

    def _set(self, at: float) -> None:
        self._at = at
        self._timer = self._loop.call_later(max(0.0, at - self._clock()), self._rings)

    def _rings(self) -> None:
        now = self._clock()
        again = self._due(now) if now >= self._at else self._at  # a loop's timers may be early by its resolution
        if again is not None:
            self._set(again)
