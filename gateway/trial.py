"""A shadow run: a candidate scheduling policy watches every queue for a while, then takes over, or does not.

Rules
- ``running`` ends once, in ``switched`` (it was swapped in), ``discarded`` (it raised, or broke its contract, in some
  queue), ``failed`` (the swap itself was refused) or ``cancelled`` (by the operator, or another swap came first).
- The candidates hear what the live policies hear and decide nothing (``policies/shadow.py``). What takes over in the
  end is a new instance: the live counters are the truth, those of a candidate end with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from gateway import log
from gateway.settings import PolicyUse
from policies.shadow import ShadowPolicy

_log = log.get("policies")

TrialState = Literal["running", "switched", "discarded", "failed", "cancelled"]
LOOK_S = 0.1
"""How long a candidate that is out may go unnoticed; it costs nothing meanwhile."""


class Trial:
    """One shadow run, over all queues. Belongs to the event loop."""

    def __init__(
        self,
        use: PolicyUse,
        seconds: float,
        shadows: Mapping[str, ShadowPolicy],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shadows``: by model."""
        self.use = use
        self.seconds = seconds
        self.state: TrialState = "running"
        self.reason: str | None = None
        """Why it did not switch."""
        self._shadows = shadows
        self._clock = clock
        self._began = clock()
        self._ended: float | None = None

    @property
    def running(self) -> bool:
        """Whether the candidate still watches."""
        return self.state == "running"

    def end(self, state: TrialState, reason: str | None = None) -> None:
        """It is over; later words do not count."""
        if self.running:
            self.state, self.reason, self._ended = state, reason, self._clock()
            picks = sum(shadow.comparison.picks for shadow in self._shadows.values())
            _log.info("shadow_ended", policy=self.use.use, state=state, reason=reason, picks=picks)

    async def run(self, switch: Callable[[], Awaitable[object]]) -> None:
        """Watch until the time is up, then ``switch``. Never raises."""
        while self.running and (left := self.seconds - (self._clock() - self._began)) > 0:
            await asyncio.sleep(min(LOOK_S, left))
            self._look()
        if not self.running:
            return
        try:
            await switch()
        except Exception as error:
            self.end("failed", f"{type(error).__name__}: {error}")
        else:
            self.end("switched")

    def as_json(self) -> dict[str, Any]:
        """For ``GET /admin/policies``; the candidate's settings are shown by the caller, who masks them."""
        ended = self._clock() if self._ended is None else self._ended
        return {
            "state": self.state,
            "reason": self.reason,
            "seconds": self.seconds,
            "elapsed_s": round(min(self.seconds, ended - self._began), 1),
            "models": {model: shadow.comparison.as_json() for model, shadow in self._shadows.items()},
        }

    def _look(self) -> None:
        for model, shadow in self._shadows.items():
            if shadow.error is not None:
                _log.error("shadow_failed", model=model, policy=self.use.use, failure=log.describe(shadow.error))
                self.end("discarded", f"{model}: {type(shadow.error).__name__}: {shadow.error}")
