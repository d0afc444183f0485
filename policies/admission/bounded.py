"""``bounded``: refuses what would find a full queue, or could not start in time.

The prediction: a tenant's line drains at least at its share of the measured service rate, and never more slowly than
the whole queue does, so the wait is min(own tokens ÷ (rate · share), all tokens ÷ rate). Queued jobs count with
their whole ``max_tokens``: an upper estimate, since many stop earlier.
"""

from __future__ import annotations

import math

from pydantic import Field

from policies.spi import PolicyConfig, PolicyContext, PolicySpec
from policies.types import AdmissionDecision, Job, QueueSnapshot

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class BoundedConfig(PolicyConfig):
    """Bounds of the queue; None = not bounded."""

    max_queued: int | None = Field(512, ge=1)
    max_queued_per_tenant: int | None = Field(256, ge=1)
    max_wait_s: float | None = Field(60.0, gt=0, allow_inf_nan=False)
    """Longest predicted wait; a job's own ``max_wait_s`` (from its class) or deadline may be shorter."""


class BoundedAdmission:
    """Pure: decides from the snapshot alone. O(1)."""

    def __init__(self, config: BoundedConfig) -> None:
        self._config = config

    def check(self, job: Job, queue: QueueSnapshot, now: float) -> AdmissionDecision:
        """Refuses with ``queue_full``, ``tenant_queue_full`` or ``predicted_wait``."""
        config = self._config
        predicted = predicted_wait_s(queue)
        if config.max_queued is not None and queue.queued >= config.max_queued:
            return self._refuse("queue_full", _per_job_s(queue.queued_tokens, queue.queued, queue, 1.0), predicted)
        if config.max_queued_per_tenant is not None and queue.queued_tenant >= config.max_queued_per_tenant:
            retry = _per_job_s(queue.queued_tokens_tenant, queue.queued_tenant, queue, queue.tenant_share)
            return self._refuse("tenant_queue_full", retry, predicted)
        limit = min(
            config.max_wait_s if config.max_wait_s is not None else math.inf,
            job.max_wait_s if job.max_wait_s is not None else math.inf,
            job.deadline - now if job.deadline is not None else math.inf,
        )
        if predicted is not None and predicted > limit:
            return self._refuse("predicted_wait", predicted - limit, predicted)
        return AdmissionDecision(True, predicted_wait_s=predicted)

    @staticmethod
    def _refuse(reason: str, retry_s: float, predicted: float | None) -> AdmissionDecision:
        return AdmissionDecision(False, reason, min(_MAX_RETRY_S, max(_MIN_RETRY_S, retry_s)), predicted)


def predicted_wait_s(queue: QueueSnapshot) -> float | None:
    """Seconds a job that joins now would wait; None without a measured rate or without a worker."""
    if not queue.service_rate or not queue.workers_ready:
        return None
    own = queue.queued_tokens_tenant / (queue.service_rate * queue.tenant_share)
    return min(own, queue.queued_tokens / queue.service_rate)


def _per_job_s(tokens: int, jobs: int, queue: QueueSnapshot, share: float) -> float:
    """Seconds until about one queued job has left, which makes room for one."""
    return tokens / jobs / (queue.service_rate * share) if queue.service_rate and jobs else _MIN_RETRY_S


def _make(config: BoundedConfig, ctx: PolicyContext) -> BoundedAdmission:
    return BoundedAdmission(config)


SPEC = PolicySpec(
    "admission", "bounded", BoundedConfig, _make, "Bounds the queue by length, length per tenant and predicted wait."
)
