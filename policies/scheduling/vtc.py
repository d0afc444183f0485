"""``vtc``: weighted fair sharing of tokens by virtual counters.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): algorithm 2, its weighted variant, and
the variant with length prediction.

Rules
- A tenant's counter is its service ÷ weight; the head of the tenant with the smallest counter runs next.
- The prompt is charged at dispatch by its length and corrected by what is reported; output is charged as it is made,
  or at dispatch by its predicted length, more as it exceeds that, the rest given back at the end (``predict``).
- A tenant that comes back from idle is lifted to the smallest counter of those waiting, or to that of the tenant that
  left the queue last when nobody waits.
- The service ÷ weight of two tenants that stay backlogged differs by at most 2·max(input_cost·L, output_cost·M) ÷
  weight over any interval, where L is the longest prompt and M the most tokens in one batch (theorem 4.4 there). With
  prediction, however wrong: by at most 2·(input_cost·L + output_cost·D·O) ÷ weight, D jobs at once, O the most of
  ``max_tokens``: what is charged but not made yet is at most that of the D that run.
"""

from __future__ import annotations

from policies.scheduling._counters import CounterScheduler, TenantLines
from policies.scheduling._lengths import Lengths, Predict, PredictingConfig
from policies.scheduling._tariff import Prepaid, Tariff
from policies.spi import PolicyContext, PolicySpec


class VtcConfig(PredictingConfig):
    """Cost per token; by default output is charged as it is made."""

    predict: Predict = "none"


class VtcScheduler(CounterScheduler):
    """O(log tenants) per operation; charging is O(1) unless it gives back."""

    __slots__ = ("_level",)

    any_members = True

    def __init__(
        self,
        tariff: Tariff,
        lengths: Lengths | None = None,
        *,
        lines: TenantLines | None = None,
        paid: Prepaid | None = None,
    ) -> None:
        """As ``CounterScheduler``."""
        super().__init__(tariff, lengths, lines=lines, paid=paid)
        self._level = 0.0  # floor until somebody left the queue here

    def _floor(self) -> float:
        if len(self.waiting):
            return float(self.waiting.min())
        last = None if self._last_left is None else self.seats.get(self._last_left)
        return self._level if last is None else last.counter

    def _why(self, counter: float, tenants: int) -> str:
        return f"least service/weight ({counter:.0f}) of {tenants} waiting tenants that fit"

    def _start(self, level: float) -> None:
        self._level = level


def _make(config: VtcConfig, ctx: PolicyContext) -> VtcScheduler:
    return VtcScheduler(config.tariff(), config.lengths())


SPEC = PolicySpec(
    "scheduling",
    "vtc",
    VtcConfig,
    _make,
    "Weighted fair shares of tokens; idle tenants earn no credit (VTC, OSDI'24).",
)
