"""Requests as an operator sees them: running, queued, and the slowest that ended lately, each with its trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.log import RequestSummary
from gateway.ticket import Ticket, TicketState

if TYPE_CHECKING:
    from gateway.service import Gateway

MAX_OPEN = 100
MAX_SLOW = 25
SLOW_WITHIN_S = 900.0


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """One that has no end yet."""

    id: str
    """The job's, which is in the answer's id."""
    tenant: str
    service_class: str
    model: str
    worker: str | None
    age_s: float
    waited_s: float
    """In the queue, so far or in all."""
    first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    retries: int
    trace_id: str
    trace_url: str | None


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """One that ended."""

    summary: RequestSummary
    ago_s: float
    trace_url: str | None
    """None where its trace was not kept."""


@dataclass(frozen=True, slots=True)
class RequestsView:
    """The page of requests."""

    running: tuple[OpenRequest, ...]
    running_total: int
    queued: tuple[OpenRequest, ...]
    queued_total: int
    slowest: tuple[SlowRequest, ...]
    within_s: float


def requests(
    gateway: Gateway, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
) -> RequestsView:
    """What is there now. The longest running and the longest waiting come first."""
    now, parts, template = clock(), gateway.parts, gateway.settings.telemetry.jaeger_ui
    tickets = [ticket for dispatcher in parts.dispatchers.values() for ticket in dispatcher.tickets]
    by_state: dict[TicketState, list[Ticket]] = {TicketState.RUNNING: [], TicketState.QUEUED: []}
    for ticket in tickets:
        by_state[ticket.state].append(ticket)
    shown = {
        state: tuple(
            _open(ticket, now, template)
            for ticket in sorted(found, key=lambda ticket: ticket.job.arrived_at)[:MAX_OPEN]
        )
        for state, found in by_state.items()
    }
    return RequestsView(
        running=shown[TicketState.RUNNING],
        running_total=len(by_state[TicketState.RUNNING]),
        queued=shown[TicketState.QUEUED],
        queued_total=len(by_state[TicketState.QUEUED]),
        slowest=tuple(
            SlowRequest(
                ended.summary,
                wall() - ended.at,
                trace_url(template, ended.summary.trace_id) if ended.summary.trace_kept else None,
            )
            for ended in parts.recent.slowest(MAX_SLOW, SLOW_WITHIN_S)
        ),
        within_s=SLOW_WITHIN_S,
    )


def trace_url(template: str | None, trace_id: str) -> str | None:
    """Where a trace can be seen: ``{trace_id}`` filled in, or ``/trace/<id>`` below a base URL. None without either."""
    if not template or not trace_id:
        return None
    if "{trace_id}" in template:
        return template.replace("{trace_id}", trace_id)
    return f"{template.rstrip('/')}/trace/{trace_id}"


def _open(ticket: Ticket, now: float, template: str | None) -> OpenRequest:
    job, usage = ticket.job, ticket.usage
    waited = now - ticket.queued_at if ticket.state is TicketState.QUEUED else ticket.queue_wait_s or 0.0
    return OpenRequest(
        id=job.id,
        tenant=job.tenant,
        service_class=job.service_class,
        model=job.model,
        worker=ticket.worker,
        age_s=now - job.arrived_at,
        waited_s=waited,
        first_token_s=None if ticket.first_token_at is None else ticket.first_token_at - job.arrived_at,
        prompt_tokens=job.prompt_tokens,
        cached_tokens=usage.cached,
        output_tokens=usage.output,
        max_tokens=job.max_tokens,
        retries=ticket.retries,
        trace_id=ticket.trace.trace_id,
        trace_url=trace_url(template, ticket.trace.trace_id),
    )
