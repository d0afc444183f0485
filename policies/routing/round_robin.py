"""``round_robin``: each worker in turn, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence

from policies.routing._load import reason
from policies.spi import NoConfig, PolicyContext, PolicySpec
from policies.types import Job, RouteDecision, WorkerView


class RoundRobin:
    """Remembers the last name, so workers may come and go. O(workers)."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, job: Job, workers: Sequence[WorkerView], now: float) -> RouteDecision:
        """The next name in alphabetical order, from the start again after the last."""
        names = [worker.name for worker in workers]
        self._last = min((name for name in names if name > self._last), default=None) or min(names)
        return RouteDecision(self._last, reason(workers))


def _make(config: NoConfig, ctx: PolicyContext) -> RoundRobin:
    return RoundRobin()


SPEC = PolicySpec("routing", "round_robin", NoConfig, _make, "Each worker in turn; for comparison and equal requests.")
