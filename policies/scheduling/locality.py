"""``locality``: the longest cached prefix first, within deficits that keep the shares fair, with ageing.

Source: Cao et al., "Locality-aware Fair Scheduling in LLM Serving" (2025): deficit longest prefix match (DLPM). There
nothing ages; here a cold job gains on hot ones while it waits.

Rules
- Rounds and deficits are those of ``drr``: per round a tenant may run ``quantum`` · weight of cost. Among the tenants
  that have a deficit left, the job with the longest hot prefix goes next (``_prefixes.py``); when none of them can run
  anything, the next round begins.
- A cached prompt token counts as ``1 / ageing`` seconds of waiting. So a job is overtaken within its tenant only by
  jobs that arrive within (their hot prefix) ÷ ``ageing`` seconds after it: its wait is bounded however long hot
  traffic lasts.
- Shares are those of ``drr``: with the larger quantum, |Wi/Qi − Wj/Qj| ≤ 1 + L/Qi + L/Qj for tenants that stay waiting.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from policies.scheduling._counters import CounterScheduler
from policies.scheduling._lengths import Lengths, PredictingConfig
from policies.scheduling._lines import Seat
from policies.scheduling._prefixes import PrefixLines
from policies.scheduling._tariff import Tariff
from policies.spi import Fits, PolicyContext, PolicySpec
from policies.types import Job


class LocalityConfig(PredictingConfig):
    """Cost per token, prediction, quantum, ageing, memory."""

    quantum: float = Field(4096.0, gt=0, allow_inf_nan=False)
    """Cost per round that a tenant of weight 1 may run: larger gives more hits and coarser shares."""
    ageing: float = Field(32.0, ge=0, allow_inf_nan=False)
    """Cached prompt tokens that a second of waiting is worth; 0: cold jobs may starve."""
    max_keys: int = Field(65_536, ge=1)
    """Prefix keys remembered; about the blocks that the workers' caches hold together."""


class LocalityScheduler(CounterScheduler):
    """O(log n) per operation and O(blocks of the prompt) per dispatch."""

    any_lines = False

    def __init__(self, tariff: Tariff, lengths: Lengths, *, quantum: float, ageing: float, max_keys: int) -> None:
        self._prefixes = PrefixLines(max_keys, ageing)
        super().__init__(tariff, lengths, lines=self._prefixes)
        self._quantum = quantum
        self._round = 0
        self._matched = 0

    def pop(self, now: float, fits: Fits) -> Job | None:
        """As in ``CounterScheduler``; first the heads at the top are looked at again, since keys may be forgotten."""
        while self._prefixes.forgot:
            seat = self.waiting.top()
            if seat is None or not self._prefixes.shrunk(seat.key):
                break
            self.waiting.put(seat, self._rank(seat))
        return super().pop(now, fits)

    def _floor(self) -> float:
        return self._round * self._quantum

    def _rank(self, seat: Seat) -> Any:
        line = seat.line
        return seat.counter // self._quantum, 0.0 if line is None else line.heap[0][4]

    def _pay(self, job: Job) -> float:
        self._matched = self._prefixes.matched(job) if job.prefix_keys else 0
        return self._paid.take(job, self._lengths.begin(job), self._matched)

    def _picked(self, job: Job, counter: float) -> None:
        turn = int(counter // self._quantum)
        if turn > self._round:
            self._round = turn
        if not job.prefix_keys:
            return
        for tenant in self._prefixes.touch(job):
            if self._waits(tenant) and self._prefixes.has(tenant):
                seat = self.seats[tenant]
                self.waiting.put(seat, self._rank(seat))

    def _why(self, counter: float, tenants: int) -> str:
        return (
            f"longest hot prefix ({self._matched} tokens, waits count) in round {self._round}; {tenants} tenants wait"
        )

    def _start(self, level: float) -> None:
        self._round = math.floor(level / self._quantum)


def _make(config: LocalityConfig, ctx: PolicyContext) -> LocalityScheduler:
    return LocalityScheduler(
        config.tariff(), config.lengths(), quantum=config.quantum, ageing=config.ageing, max_keys=config.max_keys
    )


SPEC = PolicySpec(
    "scheduling",
    "locality",
    LocalityConfig,
    _make,
    "Longest cached prefix first within a fair deficit, with ageing (DLPM).",
)
