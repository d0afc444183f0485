"""``unlimited``: admits everything and counts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.spi import Json, NoConfig, PolicyContext, PolicySpec
from policies.types import Job, JobId, QuotaDecision, Usage


class UnlimitedQuota:
    """Ignores every limit of a tenant, ``concurrent`` included."""

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        """Admit."""
        return QuotaDecision(admitted=True, cost=job.total_tokens)

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """Nothing was reserved, nothing is given back."""
        return {"refunded": 0}

    def dump(self) -> Json:
        """It has no state."""
        return {}

    def load(self, state: Json) -> None:
        """It has no state."""


def _make(config: NoConfig, ctx: PolicyContext) -> UnlimitedQuota:
    return UnlimitedQuota()


SPEC = PolicySpec("quota", "unlimited", NoConfig, _make, "No limits at all, for development and trusted networks.")
