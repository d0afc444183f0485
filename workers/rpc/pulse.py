"""Notices a peer that lives no more though its connection does: one that is stopped, or hangs.

A process that ended is told of by its socket at once; this is for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from workers.rpc.wire import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S


class Pulse:
    """Of one connection. Asks after ``KEEPALIVE_S`` of silence, and waits ``KEEPALIVE_TIMEOUT_S`` for an answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ask: Callable[[], None], lost: Callable[[], None]) -> None:
        """``ask`` sends what the peer answers; ``lost`` is called once, when it did not."""
        self.heard_at = loop.time()
        """To be set whenever anything comes."""
        self._loop = loop
        self._ask = ask
        self._lost = lost
        self._asked_at: float | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """It does not run."""
        return self._timer is None

    def start(self) -> None:
        """From now on."""
        self.heard_at = self._loop.time()
        self._again(self.heard_at + KEEPALIVE_S)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _again(self, due: float) -> None:
        self._due = due
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self.heard_at < KEEPALIVE_S:
            self._asked_at = None
            self._again(self.heard_at + KEEPALIVE_S)
        elif self._asked_at is None or self.heard_at > self._asked_at or now - self._due > KEEPALIVE_TIMEOUT_S / 2:
            # The last: this process itself stood still, and what came meanwhile is perhaps not read yet.
            self._asked_at = now
            self._ask()
            self._again(now + KEEPALIVE_TIMEOUT_S)
        else:
            self._timer = None
            self._lost()
