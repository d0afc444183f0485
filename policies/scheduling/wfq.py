"""``wfq``: weighted fair queueing by start tags, on predicted cost, corrected by actual cost.

Source: Goyal, Vin, Cheng, "Start-time Fair Queuing" (SIGCOMM 1996); with several jobs in service at once: Jin, Chase,
Kaur, "Interposed Proportional Sharing for a Storage Service Utility" (SIGMETRICS 2004), SFQ(D).

Rules
- A tenant's tag is the finish tag of its last dispatched job: start tag + cost ÷ weight. Least start tag goes first.
- Virtual time is the start tag of the job dispatched last; when nothing waits or runs it is the largest finish tag.
  A tenant that comes back from idle starts there.
- The cost is the prompt plus the predicted output. What runs beyond the prediction moves the tag on as it runs, what
  stayed below moves it back at the end.
- With D jobs in service at once and exact predictions, the service of two tenants that stay backlogged differs by at
  most (D + 1)(li/ri + lj/rj) over any interval: l is the largest cost of a job, r the weight. With wrong predictions it
  is so from the moment at which both became backlogged (l: the larger of predicted and actual cost).
"""

from __future__ import annotations

from policies.scheduling._counters import CounterScheduler
from policies.scheduling._lengths import PredictingConfig
from policies.scheduling._lines import Seat
from policies.spi import PolicyContext, PolicySpec
from policies.types import Job, TenantId


class WfqScheduler(CounterScheduler):
    """O(log tenants) per operation; charging is O(1) unless it gives back."""

    _now = 0.0
    """Virtual time."""
    _latest = 0.0
    """The largest finish tag given."""

    def _floor(self) -> float:
        return self._now

    def _why(self, counter: float, tenants: int) -> str:
        return f"least start tag ({counter:.0f}) of {tenants} waiting tenants that fit"

    def _entering(self, tenant: TenantId) -> None:
        if not len(self.waiting) and not len(self._paid):
            self._now = max(self._now, self._latest)

    def _picked(self, job: Job, counter: float) -> None:
        # A head that did not fit before may start late, with an old tag: virtual time never runs back.
        if counter > self._now:
            self._now = counter

    def _counted(self, seat: Seat, cost: float) -> None:
        if seat.counter > self._latest:
            self._latest = seat.counter

    def _start(self, level: float) -> None:
        self._now = level
        self._latest = max((seat.counter for seat in self.seats.values()), default=level)


def _make(config: PredictingConfig, ctx: PolicyContext) -> WfqScheduler:
    return WfqScheduler(config.tariff(), config.lengths())


SPEC = PolicySpec(
    "scheduling",
    "wfq",
    PredictingConfig,
    _make,
    "Weighted fair queueing by start tags on predicted cost, corrected by actual (SFQ).",
)
