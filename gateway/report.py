"""What is told of a request: its trace's frame, its log line, its metrics, its last event. Told once, at the end.

Rules
- Nothing here fails a request: it runs after the caller has its answer, and observers are isolated (``Monitor``).
- No content goes anywhere unless ``capture_content`` is on, and then only into the trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from starlette.types import Scope

from gateway import log
from gateway import trace_attributes as attributes
from gateway.choices import ChoiceDelta
from gateway.dispatch import Dispatcher
from gateway.http.middleware import request_id
from gateway.http.schemas import ChatRequest
from gateway.metrics import Metrics
from gateway.monitor import Monitor
from gateway.recent import RecentRequests
from gateway.refusals import Refusals
from gateway.request_log import RequestLog
from gateway.telemetry import Telemetry
from gateway.tenants import EffectiveTenant
from gateway.trace import RequestTrace
from gateway.visit import AnyRequest, Visit, encode_json
from policies.types import Transition, Usage

_log = log.get("request")


class Reporter:
    """Begins and ends what is told of each request."""

    def __init__(
        self,
        telemetry: Telemetry,
        metrics: Metrics,
        monitor: Monitor,
        recent: RecentRequests,
        clock: Callable[[], float] = time.monotonic,
        *,
        refusals: Refusals,
        request_log: RequestLog | None = None,
        log_ratio: float = 1.0,
    ) -> None:
        self._telemetry = telemetry
        self._metrics = metrics
        self._monitor = monitor
        self._recent = recent
        self._refusals = refusals
        self._request_log = request_log
        self.log_ratio = log_ratio
        """Part of the requests that get a log line. May be changed at any time."""
        self._clock = clock

    def begin(self, route: str, scope: Scope, generation: int) -> RequestTrace:
        """Start the trace."""
        trace = self._telemetry.request(
            scope["method"],
            route,
            scope["headers"],
            request_id=request_id(scope),
            scheme=scope.get("scheme", "http"),
            server=scope.get("server"),
            http_version=scope.get("http_version"),
        )
        trace.tag(attributes.root, policy_generation=generation)
        return trace

    def identify(self, visit: Visit, tenant: EffectiveTenant) -> None:
        """The tenant is known."""
        service_class = tenant.classes.get(tenant.service_class)
        objective = service_class.slo.ttft_p95_ms if service_class is not None else None
        visit.trace.identify(
            tenant=tenant.id,
            service_class=tenant.service_class,
            sample_ratio=tenant.sample_ratio,
            slow_first_byte_s=None if objective is None else objective / 1e3,
        )

    def content(self, visit: Visit, deltas: Iterable[ChoiceDelta]) -> None:
        """What was asked and answered, where the operator wants it in the trace."""
        if not visit.trace.captures_content or visit.request is None:
            return
        texts: dict[int, list[str]] = {}
        for delta in deltas:
            texts.setdefault(delta.index, []).append(delta.text)
        said = [_message("assistant", "".join(pieces)) for _, pieces in sorted(texts.items())]
        visit.trace.content(
            input_messages=encode_json(_asked(visit.request)).decode(), output_messages=encode_json(said).decode()
        )

    def end(self, visit: Visit, dispatchers: Mapping[str, Dispatcher]) -> None:
        """The request is settled: count it, log it, end its trace."""
        now = self._clock()
        ticket, prepared = visit.ticket, visit.prepared
        status = visit.reply.status
        if ticket is not None:
            visit.trace.tag(attributes.root, worker=ticket.worker, preemptions=ticket.preemptions)
        keep = visit.trace.finish(visit.outcome, status=status, error_type=visit.reason, reason=visit.reason)
        if ticket is not None and self._telemetry.enabled:
            dispatchers[ticket.job.model].keep(ticket, keep)
        if visit.principal is not None:
            self._refusals.count(visit.principal, visit.outcome, status)
        if visit.reason == "client_disconnected":
            self._metrics.client_disconnected()
        if visit.reason == "slow_reader":
            self._metrics.slow_reader()
        if prepared is not None:
            refused = visit.outcome in ("shed", "throttled")
            self._monitor.event(
                prepared.job,
                Transition.SHED if refused else Transition.FINISHED,
                now,
                worker=ticket.worker if ticket is not None else None,
                outcome=visit.outcome,
                reason=visit.reason,
                usage=ticket.usage if ticket is not None else None,
            )
        summary = self._summary(visit, now, keep)
        self._metrics.request_finished(summary)
        self._recent.add(summary)
        log.log_request(_log, summary, self.log_ratio)
        if self._request_log is not None:
            self._request_log.write(
                summary,
                prepared.job if prepared is not None else None,
                visit.model.block_size if visit.model is not None else None,
            )

    def _summary(self, visit: Visit, now: float, keep: bool) -> log.RequestSummary:
        ticket, tenant = visit.ticket, visit.tenant
        first = ticket.first_token_at if ticket is not None else None
        return log.RequestSummary(
            request_id=visit.request_id,
            route=visit.endpoint.route,
            outcome=visit.outcome,
            duration_s=now - visit.arrived,
            status=visit.reply.status,
            reason=visit.reason,
            trace_id=visit.trace.trace_id,
            trace_kept=keep,
            tenant=tenant.id if tenant is not None else None,
            service_class=_class(visit),
            model=visit.model.name if visit.model is not None else None,
            adapter=visit.adapter.name if visit.adapter is not None else None,
            worker=ticket.worker if ticket is not None else None,
            stream=visit.request.stream if visit.request is not None else False,
            usage=ticket.usage if ticket is not None else Usage(),
            queue_wait_s=ticket.queue_wait_s if ticket is not None else None,
            first_token_s=None if first is None else first - visit.arrived,
            preemptions=ticket.preemptions if ticket is not None else 0,
        )


def _class(visit: Visit) -> str | None:
    if visit.prepared is not None:
        return visit.prepared.job.service_class
    return visit.tenant.service_class if visit.tenant is not None else None


def _asked(request: AnyRequest) -> list[object]:
    """GenAI conventions' shape of messages."""
    if isinstance(request, ChatRequest):
        return [_message(message.role, message.content) for message in request.messages]
    return [_message("user", request.prompt if isinstance(request.prompt, str) else str(list(request.prompt)))]


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
