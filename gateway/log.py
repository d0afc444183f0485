"""The gateway's log: set-up as in every process, and the one line per request.

The line is written once, at the end, for every request that got past the headers (or the part of them that
``log.sample_ratio`` says). It holds who, what came of it and how
long it took; never content, keys or tokens (``workers.log`` states the rules).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from gateway.errors import Outcome
from policies.types import Usage
from workers.log import LEVEL_ENV, Format, configure, describe, get

__all__ = ["LEVEL_ENV", "Format", "RequestSummary", "configure", "describe", "get", "log_request"]


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """What a request was and what came of it: the log line, and what ``Metrics.request_finished`` counts."""

    request_id: str
    route: str
    """``/v1/chat/completions``: the route, not the raw path."""
    outcome: Outcome
    duration_s: float
    """From arrival to the last byte or the refusal."""
    status: int | None = None
    """What the client was sent; None when it left before."""
    reason: str | None = None
    """Code of a refusal or failure (``queue_full``, ``tokens_per_minute``, ``worker_lost``)."""
    trace_id: str = ""
    trace_kept: bool = False
    tenant: str | None = None
    """Verified tenant; None before authentication succeeded."""
    service_class: str | None = None
    model: str | None = None
    """As configured; None when the request named no known one."""
    adapter: str | None = None
    worker: str | None = None
    stream: bool = False
    usage: Usage = field(default_factory=Usage)
    queue_wait_s: float | None = None
    first_token_s: float | None = None
    """From arrival to the first output token."""
    preemptions: int = 0


def log_request(logger: FilteringBoundLogger, summary: RequestSummary, ratio: float = 1.0) -> None:
    """Write the line: ``info``, or ``warning`` for outcomes that an operator should look at.

    ``ratio``: of the requests that went as they should, so many get a line, which then says so (``sampled``).
    """
    failed = summary.outcome == "timeout" or (summary.outcome == "error" and not 400 <= (summary.status or 500) < 500)
    sampled = ratio < 1.0 and not failed and summary.outcome != "shed"
    if sampled and random.random() >= ratio:  # noqa: S311 - a sample, not a secret
        return
    fields = {
        "request_id": summary.request_id,
        "trace_id": summary.trace_id or None,
        "route": summary.route,
        "status": summary.status,
        "outcome": summary.outcome,
        "reason": summary.reason,
        "tenant": summary.tenant,
        "class": summary.service_class,
        "model": summary.model,
        "adapter": summary.adapter,
        "worker": summary.worker,
        "stream": summary.stream,
        "prompt_tokens": summary.usage.prompt + summary.usage.cached,
        "cached_tokens": summary.usage.cached,
        "output_tokens": summary.usage.output,
        "queue_ms": _ms(summary.queue_wait_s),
        "first_token_ms": _ms(summary.first_token_s),
        "duration_ms": _ms(summary.duration_s),
        "preemptions": summary.preemptions or None,
        "sampled": ratio if sampled else None,
    }
    write = logger.warning if failed else logger.info
    write("request", **{key: value for key, value in fields.items() if value is not None})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
