"""``bounded``: refuses what would find a full queue, or could not start in time; may lessen its demands before.

The prediction: a tenant's line drains at least at its share of the measured service rate, and never more slowly than
the whole queue does, so the wait is min(own tokens ÷ (rate · share), all tokens ÷ rate). Queued jobs count with
the part of their prompt + ``max_tokens`` that jobs really took of late, with all of it before that is known.

Overload: from a predicted wait on, output is clamped, so that the queue gets shorter; what would be refused may be
offered to another model. Both are off unless configured, and the caller is told in a header.
"""

from __future__ import annotations

import math

from pydantic import Field

from policies.spi import PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec
from policies.types import AdmissionDecision, Job, QueueSnapshot

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class OverloadConfig(PolicyConfig):
    """What is done before anybody is refused."""

    after_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Predicted wait from which output is clamped; null: half of the longest one that is let in."""
    clamp_max_tokens: int | None = Field(None, ge=1)
    """Most output tokens of a choice then; null: as asked for."""
    fallback_model: str | None = Field(None, min_length=1)
    """Model that is asked instead of refusing, where the tenant may use it; null: none."""


class BoundedConfig(PolicyConfig):
    """Bounds of the queue; None = not bounded."""

    max_queued: int | None = Field(512, ge=1)
    max_queued_per_tenant: int | None = Field(256, ge=1)
    max_wait_s: float | None = Field(60.0, gt=0, allow_inf_nan=False)
    """Longest predicted wait; a job's own ``max_wait_s`` (from its class) or deadline may be shorter."""
    overload: OverloadConfig = OverloadConfig()


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
        return AdmissionDecision(True, predicted_wait_s=predicted, clamp_max_tokens=self._clamp(predicted, limit))

    def _clamp(self, predicted: float | None, limit: float) -> int | None:
        overload = self._config.overload
        after = limit / 2 if overload.after_s is None else overload.after_s
        return overload.clamp_max_tokens if predicted is not None and predicted > after else None

    def _refuse(self, reason: str, retry_s: float, predicted: float | None) -> AdmissionDecision:
        retry = min(_MAX_RETRY_S, max(_MIN_RETRY_S, retry_s))
        return AdmissionDecision(False, reason, retry, predicted, fallback_model=self._config.overload.fallback_model)


def predicted_wait_s(queue: QueueSnapshot) -> float | None:
    """Seconds a job that joins now would wait; None without a measured rate or without a worker."""
    if not queue.service_rate or not queue.workers_ready:
        return None
    rate = queue.service_rate / _used(queue)
    return min(queue.queued_tokens_tenant / (rate * queue.tenant_share), queue.queued_tokens / rate)


def _per_job_s(tokens: int, jobs: int, queue: QueueSnapshot, share: float) -> float:
    """Seconds until about one queued job has left, which makes room for one."""
    return tokens * _used(queue) / jobs / (queue.service_rate * share) if queue.service_rate and jobs else _MIN_RETRY_S


def _used(queue: QueueSnapshot) -> float:
    """Part of the queued tokens that will really run."""
    return queue.used_ratio if queue.used_ratio else 1.0


def _make(config: BoundedConfig, ctx: PolicyContext) -> BoundedAdmission:
    fallback = config.overload.fallback_model
    if fallback is not None and ctx.models and fallback not in ctx.models:
        known = ", ".join(sorted(ctx.models))
        raise PolicyConfigError(f"no model is named {fallback!r} (known: {known})", "overload.fallback_model")
    return BoundedAdmission(config)


SPEC = PolicySpec(
    "admission", "bounded", BoundedConfig, _make, "Bounds the queue by length, length per tenant and predicted wait."
)
