"""``least_loaded``: the worker with the smallest share of its slots in use."""

from __future__ import annotations

from collections.abc import Sequence

from policies.routing._load import least, reason
from policies.spi import NoConfig, PolicyContext, PolicySpec
from policies.types import Job, RouteDecision, WorkerView


class LeastLoaded:
    """Stateless. O(workers)."""

    def choose(self, job: Job, workers: Sequence[WorkerView], now: float) -> RouteDecision:
        """By slots, then by tokens owed, then by name."""
        return RouteDecision(least(workers).name, reason(workers))


def _make(config: NoConfig, ctx: PolicyContext) -> LeastLoaded:
    return LeastLoaded()


SPEC = PolicySpec("routing", "least_loaded", NoConfig, _make, "To the worker with the most room.")
