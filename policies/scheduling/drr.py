"""``drr``: deficit round robin in tokens: each tenant in turn, for a quantum of cost per round and unit of weight.

Source: Shreedhar, Varghese, "Efficient Fair Queuing using Deficit Round-Robin" (SIGCOMM 1995), in the variant that
serves while the deficit is positive and lets it go below zero ("surplus round robin"): a job's cost is known only when
it has run.

Rules
- Every waiting tenant is visited once per round, in the order in which it joined. A visit adds quantum · weight to its
  deficit and serves it while that is positive. Costs are the prompt plus the predicted output, corrected as it runs.
- A tenant that joins, or comes back, takes its place at the end of the round that is under way, without credit from
  earlier; a debt stays.
- With Q = quantum · weight and L the largest cost of a job, the service of two tenants that stay waiting differs by
  |Wi/Qi − Wj/Qj| ≤ 1 + L/Qi + L/Qj over any interval, counting a job where it is dispatched, at its predicted cost.

The deficit is not kept: a tenant's counter (service ÷ weight) divided by the quantum is the round in which it may be
served next. So rounds in which everybody is in debt are skipped in one step, and counters carry over to other policies.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from policies.scheduling._counters import CounterScheduler
from policies.scheduling._lengths import Lengths, PredictingConfig
from policies.scheduling._lines import Seat
from policies.scheduling._tariff import Tariff
from policies.spi import PolicyContext, PolicySpec
from policies.types import Job, TenantId


class DrrConfig(PredictingConfig):
    """Cost per token, prediction, and the quantum."""

    quantum: float = Field(512.0, gt=0, allow_inf_nan=False)
    """Cost per round that a tenant of weight 1 may run."""


class DrrScheduler(CounterScheduler):
    """O(log tenants) per operation, however small the quantum is."""

    any_members = True

    def __init__(self, tariff: Tariff, lengths: Lengths, quantum: float) -> None:
        super().__init__(tariff, lengths)
        self._quantum = quantum
        self._round = 0
        self._places: dict[TenantId, int] = {}
        self._joined = 0

    def _floor(self) -> float:
        return self._round * self._quantum

    def _rank(self, seat: Seat) -> Any:
        return seat.counter // self._quantum, self._places[seat.key]

    def _why(self, counter: float, tenants: int) -> str:
        return f"its turn in round {self._round} of {tenants} waiting tenants"

    def _entering(self, tenant: TenantId) -> None:
        self._joined += 1
        self._places[tenant] = self._joined

    def _picked(self, job: Job, counter: float) -> None:
        turn = int(counter // self._quantum)
        if turn > self._round:
            self._round = turn

    def _closed(self, seat: Seat) -> None:
        super()._closed(seat)
        del self._places[seat.key]

    def _start(self, level: float) -> None:
        self._round = math.floor(level / self._quantum)


def _make(config: DrrConfig, ctx: PolicyContext) -> DrrScheduler:
    return DrrScheduler(config.tariff(), config.lengths(), config.quantum)


SPEC = PolicySpec(
    "scheduling", "drr", DrrConfig, _make, "Deficit round robin in tokens: each tenant in turn, a quantum per round."
)
