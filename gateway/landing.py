"""What workers report of the requests they have: output, ends, errors, and their own loss.

Rules
- Tokens become text first, then they are billed and charged: those past a stop string are in no charge. The worker is
  told at once of a choice that a stop string ended, while the others go on.
- A caller's mistake ends its request with 400 and says nothing about the worker; a worker's fault is retried once while
  the caller got nothing (``retry.py``); what it handed back unstarted is queued again, a few times.
- Failing to handle one request's output ends that request only.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway import log
from gateway.desk import Desk
from gateway.errors import ApiError, bad_request, internal, timed_out, unavailable
from gateway.flights import Flight
from gateway.http.fieldnames import own_name, shape_param
from gateway.http.schemas import Request
from gateway.pool_roles import PoolRoles
from gateway.retry import MAX_REFUSALS, MAX_RETRIES, MAX_STRIKES, QuarantinedError, RetryBudget, Strikes, fingerprint
from gateway.settings import FallbackReason
from gateway.ticket import CancelledByCaller, Ticket, TicketState
from gateway.worker_handle import WorkerHandle, WorkerLoss
from policies.types import DeviceTime, RequeueReason, Transition
from workers.protocol import SequenceOutput, StepOutputs

_log = log.get("dispatch")

REFUSED = frozenset({"overloaded", "draining", "cancelled", "adapter"})
"""Ends by which a worker hands a request back that nobody had cancelled."""
FAILED = frozenset({"internal", "upstream_failed", "upstream_timeout"})
"""Ends that are the worker's fault: another attempt may fare better."""
TURNED_AWAY: Mapping[str, FallbackReason] = {
    "throttled": "overload",
    "unavailable": "overload",
    "prompt_too_long": "context",
}
"""Ends by which a worker will not have a request that another one might."""
UPSTREAM_RETRY_S = 1.0


class Landing:
    """Takes in one model's reports."""

    def __init__(self, desk: Desk, roles: PoolRoles) -> None:
        self._desk = desk
        self._roles = roles
        self._strikes = Strikes()
        self.budget = RetryBudget()

    def inspect(self, ticket: Ticket, now: float) -> None:
        """Look a new request up among those that broke workers. Raises ApiError 500 for a quarantined one."""
        if not len(self._strikes):
            return
        key = self._fingerprint(ticket)
        strikes = self._strikes.count(key, now)
        if strikes >= MAX_STRIKES:
            raise QuarantinedError
        ticket.suspect, ticket.lost_at = strikes > 0, self._strikes.produced(key)

    def outputs(self, handle: WorkerHandle, outputs: StepOutputs) -> None:
        """News of one or several steps of one worker."""
        now = self._desk.clock()
        if outputs.stats.device_ns:
            self._desk.monitor.device(self._desk.model.name, handle.name, outputs.stats.device_ns)
        for output in outputs.outputs:
            flight = self._desk.flights.get(output.id)
            if flight is None:
                continue
            try:
                if flight.prefill is handle:
                    self._prefilled(flight, output, now)
                elif flight.handle is handle and output.index in flight.open:
                    self._take(flight, output, now)
            except Exception as error:
                _log.error("output_failed", job=output.id, failure=log.describe(error))
                self._desk.monitor.fault("outputs")
                self._desk.stop(flight)
                self._desk.end(flight.ticket, internal(), now)

    def lost(self, handle: WorkerHandle, reason: WorkerLoss) -> None:
        """A worker is gone with everything it had."""
        now = self._desk.clock()
        flights = [flight for flight in self._desk.flights.at(handle.name) if flight.handle is handle]
        lent = [flight for flight in self._desk.flights if flight.prefill is handle]
        for flight in lent:
            flight.prefill = None
        if reason.suspicious:
            computed = [flight for flight in lent if flight.ticket.job.id in reason.computing]
            strikes = self._strike([*flights, *computed], now)
        else:
            strikes = dict.fromkeys(flights, 0)
        culprit_found = any(count >= MAX_STRIKES for count in strikes.values())
        back: list[Ticket] = []
        for flight in flights:
            self._desk.flights.remove(flight)
            ticket = flight.ticket
            self._desk.stop_prefill(flight)
            if ticket.done:
                continue
            if ticket.cancelled:
                self._desk.end(ticket, CancelledByCaller(), now)
            elif strikes[flight] >= MAX_STRIKES:
                self._desk.end(ticket, QuarantinedError(), now)
            elif culprit_found and not ticket.committed:
                back.append(ticket)  # a bystander of a loss that is explained: it costs no retry
            elif self._may_retry(ticket):
                ticket.retries += 1
                back.append(ticket)
            else:
                self._desk.end(ticket, unavailable("The worker that ran this request was lost.", "worker_lost"), now)
        self._desk.requeue(back, RequeueReason.WORKER_LOST, now)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _take(self, flight: Flight, output: SequenceOutput, now: float) -> None:
        ticket = flight.ticket
        choice = flight.choices[output.index]
        delta = choice.take(output)
        flight.advance(output)
        if output.finish is not None:
            flight.ended(output.index)
            if output.timings is not None:
                ticket.preemptions += output.timings.preemptions
            if output.device_ns is not None:
                self._paid(ticket, output, output.device_ns)
        if not flight.open:
            self._desk.flights.remove(flight)
        if ticket.done:
            return
        ran = choice.billed if output.searched is None else output.searched
        charge = ticket.meter.observe(
            output.index, output.prompt_computed, output.prompt_cached, ran, output.prompt_tokens
        )
        if charge.total:
            self._desk.charge(ticket, charge, now)
        if output.searched:
            self._begun(ticket, now)
        elif delta.billed:
            self._produced(flight, output.index, delta.billed, now)
        if delta.error is not None or (delta.finish == "cancelled" and not ticket.cancelled):
            self._failed(flight, delta.error or "cancelled", now, output)
            return
        if delta.stopped and not flight.answered:
            self._desk.stop(flight, output.index)
        if not delta.empty:
            ticket.push(delta)
        if ticket.cancelled:
            if not flight.open:
                self._desk.end(ticket, CancelledByCaller(), now)
        elif flight.answered:
            ticket.finish_reasons = tuple([choice.finish or "stop" for choice in flight.choices])
            self._absolve(flight)
            self._desk.stop(flight)
            self._desk.end(ticket, None, now)

    def _prefilled(self, flight: Flight, output: SequenceOutput, now: float) -> None:
        """News of the worker that computes the prompt: it is charged as it is computed."""
        ticket = flight.ticket
        if output.device_ns is not None:
            self._paid(ticket, output, output.device_ns)
        if not ticket.done:
            charge = ticket.meter.observe(0, output.prompt_computed, output.prompt_cached, 0)
            if charge.total:
                self._desk.charge(ticket, charge, now)

    def _paid(self, ticket: Ticket, output: SequenceOutput, device_ns: tuple[int, int, int]) -> None:
        """Its worker told what it took; of an attempt that failed all of it was for nothing."""
        computed, again, failed = device_ns
        spent = DeviceTime(computed, again, failed)
        if output.finish == "error" or (output.finish == "cancelled" and not ticket.cancelled and not ticket.done):
            spent = DeviceTime(retry_ns=spent.total_ns)
        self._desk.monitor.ran_for(ticket.job, spent)

    def _produced(self, flight: Flight, index: int, tokens: int, now: float) -> None:
        ticket = flight.ticket
        before = flight.last_token_at.get(index)
        if before is not None:
            gap = (now - before) / tokens
            longest = gap > flight.longest_gap
            if longest:
                flight.longest_gap = gap
            self._desk.monitor.gap(ticket.job, gap, ticket.trace.sampled_id if longest else "")
        flight.last_token_at[index] = now
        self._begun(ticket, now)
        if flight.load.suspect and flight.produced > ticket.lost_at:
            self._absolve(flight)

    def _begun(self, ticket: Ticket, now: float) -> None:
        if ticket.produced(now):
            self._desk.monitor.event(ticket.job, Transition.FIRST_TOKEN, now, worker=ticket.worker)

    def _failed(self, flight: Flight, code: str, now: float, output: SequenceOutput) -> None:
        """A choice ended by an error: so does the request, or its attempt."""
        ticket = flight.ticket
        whole = not flight.open
        self._desk.stop(flight)
        if ticket.cancelled:
            if whole:
                self._desk.end(ticket, CancelledByCaller(), now)
            return
        if whole and self._handed_on(ticket, code, now):
            ticket.refusals += 1
            self._desk.requeue([ticket], RequeueReason.WORKER_REFUSED, now)
        elif code in FAILED and whole and self._may_retry(ticket):
            ticket.retries += 1
            self._desk.requeue([ticket], RequeueReason.WORKER_LOST, now)
        else:
            error = _worker_error(code, ticket.prepared.request, output.retry_after_s, output.error_param)
            self._desk.end(ticket, error, now)

    def _handed_on(self, ticket: Ticket, code: str, now: float) -> bool:
        """Whether it is queued again: handed back unstarted, or turned away where another worker may still take it."""
        if ticket.committed or ticket.refusals >= MAX_REFUSALS:
            return False
        if code in TURNED_AWAY:
            ticket.turned_away.add(TURNED_AWAY[code])
            return self._roles.elsewhere(ticket, now)
        return code in REFUSED

    def _may_retry(self, ticket: Ticket) -> bool:
        return not ticket.committed and ticket.retries < MAX_RETRIES and self.budget.spend()

    def _strike(self, flights: list[Flight], now: float) -> dict[Flight, int]:
        """Strikes against each of them after this loss: one more per fingerprint, however many flights share it.

        Equal requests that wait are suspects as well, or are quarantined with them.
        """
        furthest: dict[bytes, int] = {}
        for flight in flights:
            key = self._fingerprint(flight.ticket)
            furthest[key] = max(flight.produced, furthest.get(key, 0))
        counts = {key: self._strikes.strike(key, now, produced) for key, produced in furthest.items()}
        for ticket in [*(flight.ticket for flight in flights), *self._queued()]:
            key = self._fingerprint(ticket)
            if key in counts:
                ticket.suspect, ticket.lost_at = True, furthest[key]
                if ticket.state is TicketState.QUEUED and counts[key] >= MAX_STRIKES:
                    self._desk.end(ticket, QuarantinedError(), now)
        return {flight: counts[self._fingerprint(flight.ticket)] for flight in flights}

    def _absolve(self, flight: Flight) -> None:
        ticket = flight.ticket
        if not ticket.suspect:
            return
        key = self._fingerprint(ticket)
        self._strikes.clear(key)
        ticket.suspect = flight.load.suspect = False
        for other in self._queued():
            if other.suspect and self._fingerprint(other) == key:
                other.suspect = False

    def _queued(self) -> list[Ticket]:
        return [ticket for ticket in self._desk.tickets.values() if ticket.state is TicketState.QUEUED]

    def _fingerprint(self, ticket: Ticket) -> bytes:
        if ticket.fingerprint is None:
            job = ticket.job
            ticket.fingerprint = fingerprint(job.tenant, job.model, ticket.prepared.generate)
        return ticket.fingerprint


def _worker_error(code: str, request: Request, retry_after_s: float | None, field: str) -> ApiError:
    """What the caller is told. An upstream's own words never are: they may say where and what it is. ``field``: which
    one of those that it was sent it will not have."""
    upstream = _upstream_error(code, retry_after_s)
    if upstream is not None:
        return upstream
    if code == "prompt_too_long":
        return bad_request(
            "The prompt and max_tokens do not fit the model's cache. Shorten the prompt or lower "
            f"{request.max_tokens_param}.",
            param=request.content_param,
            code="context_length_exceeded",
        )
    if code == "grammar":
        return bad_request(
            "The answer's grammar became too complex on the way, or allowed no token any more. Simplify the schema.",
            param=shape_param(request),
            code="invalid_grammar",
        )
    if code == "bad_request":
        return _refused(own_name(request, field) if field else None)
    if code in REFUSED:
        return unavailable("No worker could take this request.", "worker_overloaded")
    return ApiError(
        500, "The worker failed while it ran this request.", type="server_error", code="worker_error", retry_after_s=1.0
    )


def _refused(param: str | None) -> ApiError:
    if param is None:
        return bad_request("The model's worker refused the request's parameters. Leave optional ones out.")
    return bad_request(f"The server behind this model refuses this {param}. Change it or leave it out.", param=param)


def _upstream_error(code: str, retry_after_s: float | None) -> ApiError | None:
    wait_s = UPSTREAM_RETRY_S if retry_after_s is None else retry_after_s
    if code == "throttled":
        message = "The server behind this model takes no more requests for now. Retry later."
        return ApiError(429, message, type="rate_limit_error", code="upstream_throttled", retry_after_s=wait_s)
    if code == "unavailable":
        return unavailable("The server behind this model is not available for now.", "upstream_unavailable", wait_s)
    if code == "upstream_timeout":
        return timed_out("The server behind this model did not go on in time.", "upstream_timeout")
    if code == "upstream_failed":
        message = "The server behind this model failed, or cannot be reached."
        return ApiError(502, message, type="server_error", code="upstream_failed", retry_after_s=wait_s)
    return None
