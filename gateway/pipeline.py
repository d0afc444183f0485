"""The one place that states the order of a request.

    authenticate → look up tenant → read, parse, validate → look up model → prepare → admission → quota reserve
    → queue, route, dispatch → first token → stream or answer → settle

Rules
- A reservation that was asked for is settled exactly once, whatever await fails or is cancelled: ``_settle`` makes one
  task of it, which nobody's cancellation reaches. It ends the ticket first, so that usage is what really ran.
- Settling comes before the last byte: a caller that has its answer finds its slot free.
- From the whole body on, the work runs beside a watch on the caller and under the total deadline; either ends it by
  cancelling the work, wherever it waits. So does a reader that does not read (``delivery.py``).
- Nothing is sent before the first output or the failure is known. Afterwards a failure is an error event inside the
  stream; ``[DONE]`` is sent after success only.
- Policies are asked through ``gatekeeper.py``, which fails closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from gateway import log
from gateway import trace_attributes as attributes
from gateway.access import check_features
from gateway.arriving import Arriving
from gateway.delivery import Delivery
from gateway.dispatch import Dispatcher
from gateway.entrance import Entrance
from gateway.errors import ApiError, bad_request, internal, timed_out
from gateway.gatekeeper import Gatekeeper, over_quota
from gateway.http import sse
from gateway.http.middleware import request_id, send_error, watch_disconnect
from gateway.http.openai import Format
from gateway.http.schemas import parse
from gateway.intake import Intake
from gateway.jobs import make_job
from gateway.models import Models
from gateway.monitor import Monitor
from gateway.purge import sweep_behind
from gateway.replays import Replays
from gateway.report import Reporter
from gateway.runtime import Runtime
from gateway.settings import Timeouts
from gateway.tenants import Tenants
from gateway.ticket import Ticket
from gateway.visit import Endpoint, Errand, Reply, Visit
from gateway.within import within
from policies.spi import QuotaPolicy
from policies.types import Job, JobId, Principal, QuotaDecision, Transition, Usage

_log = log.get("pipeline")

CANCEL_GRACE_S = 0.25
"""How long a settlement waits for the worker's last word on a request that was cut short."""
WORK_END_S = 1.0
"""How long cancelled work may take to notice."""
FAREWELL_S = 1.0
"""How long an error may take to be written to a caller that does not read."""
BODY_S = 30.0


class Pipeline:
    """Runs requests. One per gateway; state of a request is in its ``Visit``."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        tenants: Tenants,
        models: Models,
        entrance: Entrance,
        dispatchers: Mapping[str, Dispatcher],
        gatekeeper: Gatekeeper,
        reporter: Reporter,
        delivery: Delivery,
        intake: Intake,
        replays: Replays,
        monitor: Monitor,
        timeouts: Timeouts,
        max_body_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._tenants = tenants
        self._models = models
        self._entrance = entrance
        self._dispatchers = dispatchers
        self._gatekeeper = gatekeeper
        self._reporter = reporter
        self.delivery = delivery
        self._intake = intake
        self.replays = replays
        self._monitor = monitor
        self._timeouts = timeouts
        self.arriving = Arriving(max_body_bytes)
        self._clock = clock
        self._settling: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.active = 0
        """Requests between their headers and their last byte."""

    def retime(self, timeouts: Timeouts) -> None:
        """Time limits of requests that arrive from now on."""
        self._timeouts = timeouts

    async def wait_idle(self) -> None:
        """Return when no request is here."""
        await self._idle.wait()

    async def wait_settled(self) -> None:
        """Return when no settlement is on its way."""
        while self._settling:
            await asyncio.wait(set(self._settling))

    async def run(self, endpoint: Endpoint | Errand, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, from its headers to its last byte. Raises only CancelledError."""
        policies = self._runtime.current
        visit = Visit(
            endpoint,
            scope,
            receive,
            Reply(send),
            policies,
            self._reporter.begin(endpoint.route, scope, policies.generation),
            request_id(scope),
            self._clock(),
        )
        self.active += 1
        self._idle.clear()
        try:
            await self._guarded(visit)
        finally:
            try:
                await self._leave(visit)
            finally:
                self.active -= 1
                if not self.active:
                    self._idle.set()

    async def _guarded(self, visit: Visit) -> None:
        """Turn whatever ends the work into an outcome, and into an answer where somebody waits for one."""
        try:
            await self._serve(visit)
        except ClientDisconnect:
            if visit.delivered:  # it had everything and left before the formalities
                visit.end("ok")
            else:
                visit.trace.event("client_disconnected")
                visit.end("cancelled", "client_disconnected")
            return
        except ApiError as error:
            refusal = error
        except asyncio.CancelledError:
            visit.end("cancelled", "server_stopping")
            raise
        except Exception as error:
            _log.error("request_failed", request_id=visit.request_id, failure=log.describe(error))
            refusal = internal()
        else:
            visit.end("ok")
            return
        visit.end(refusal.outcome, refusal.reason)
        await self._refuse(visit, refusal)

    # -- the order ------------------------------------------------------------------------------------------------

    async def _serve(self, visit: Visit) -> None:
        principal = visit.principal = await self._authenticated(visit)
        visit.tenant = self._tenants.of(principal)
        self._reporter.identify(visit, visit.tenant)
        body = await self._body(visit)
        await self._supervised(visit, body)

    async def _work(self, visit: Visit, body: bytes) -> None:
        """Everything from the body on."""
        endpoint = visit.endpoint
        if isinstance(endpoint, Errand):
            await self._errand(visit, endpoint, body)
        elif (joined := await self.replays.join(visit, body)) is not None:
            await self.delivery.replay(visit, joined)
        else:
            await self._inference(visit, endpoint, body)

    async def _errand(self, visit: Visit, endpoint: Errand, body: bytes) -> None:
        """What the gateway answers by itself."""
        assert visit.tenant is not None
        assert visit.principal is not None
        request = await parse(endpoint.parse, body)
        visit.model, _ = self._models.choose(request.model, visit.tenant)
        model = visit.model
        job_id = JobId(secrets.token_hex(12))
        job = visit.errand = make_job(visit.principal, visit.tenant, model.name, job_id, visit.arrived)
        visit.decision = await self._reserved(visit, job)
        with visit.span("tokenize"):
            answer = await self._intake.errand(visit.tenant, request.chars, partial(endpoint.answer, request, model))
        await self._settle(visit)
        visit.trace.event("first_byte")
        await visit.reply.whole(200, visit.headers(self._clock()), answer)

    async def _inference(self, visit: Visit, endpoint: Endpoint, body: bytes) -> None:
        """What goes to a worker."""
        assert visit.tenant is not None
        request = visit.request = await parse(endpoint.parse, body)
        check_features(request.features(), visit.tenant.grants)
        self._entrance.choose(visit, request.model)
        visit.trace.tag(attributes.root(stream=request.stream))
        prepared = await self._entrance.admitted(visit)
        visit.decision = await self._reserved(visit, prepared.job)
        dispatcher = self._dispatchers[prepared.job.model]
        ticket = visit.ticket = dispatcher.submit(prepared, stream=request.stream, trace=visit.trace)
        ticket.on_dispatched = partial(self._started, visit.policies.quota, prepared.job.id)
        answer = visit.format = self._format(visit, endpoint, ticket)
        await self.delivery.first_output(visit, ticket, self._timeouts.first_token_s)
        deliver = self.delivery.stream if request.stream else self.delivery.whole
        await deliver(visit, ticket, answer, self._settling_of)
        visit.trace.event("last_byte")

    async def _authenticated(self, visit: Visit) -> Principal:
        with visit.span("auth") as span:
            principal = await self._gatekeeper.authenticate(visit.scope, visit.policies)
            span.set(attributes.auth(principal))
        return principal

    async def _body(self, visit: Visit) -> bytes:
        assert visit.tenant is not None
        try:
            return await within(BODY_S, self.arriving.body(visit.tenant.id, visit.receive))
        except TimeoutError:
            raise bad_request(
                f"The body did not arrive within {BODY_S:.0f} seconds.", code="body_timeout", status=408
            ) from None

    async def _supervised(self, visit: Visit, body: bytes) -> None:
        """Run the work until it ends, the caller leaves or the time is up. Raises ClientDisconnect, ApiError 504."""
        loop = asyncio.get_running_loop()
        end = visit.too_slow = loop.create_future()

        def ended(_: object = None) -> None:
            if not end.done():
                end.set_result(None)

        work = asyncio.create_task(self._work(visit, body), name="request")
        watch = asyncio.create_task(self._gone(visit), name="disconnect watch")
        work.add_done_callback(ended)
        watch.add_done_callback(ended)
        left = self._timeouts.total_s - (self._clock() - visit.arrived)
        timer = loop.call_later(max(0.0, left), ended)
        try:
            try:
                await end
            except ApiError:  # a reader that is too slow
                if not work.done():
                    raise
            if work.done():
                return work.result()
            if watch.done():
                raise ClientDisconnect
            raise timed_out(f"The request took longer than {self._timeouts.total_s:g} seconds in all.", "total_timeout")
        finally:
            timer.cancel()
            watch.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work, watch}, timeout=WORK_END_S)
            watch.add_done_callback(_retrieve)  # it notices in the next turn of the loop; nobody waits for that
            for future in (work, end):
                _retrieve(future)

    async def _gone(self, visit: Visit) -> None:
        """Return when nobody waits for the answer any more."""
        await watch_disconnect(visit.receive)
        if visit.recording is not None:
            await visit.recording.deserted(self.replays.settings.linger_s)

    async def _reserved(self, visit: Visit, job: Job) -> QuotaDecision:
        """Take quota. Raises ApiError 429, 400 for what could never pass, 503 for a policy that fails."""
        with visit.span("quota reserve") as span:
            visit.reserved = True
            decision = await self._gatekeeper.reserve(job, visit.policies)
            span.set(attributes.quota(decision))
            if not decision.admitted:
                visit.reserved = False
                visit.decision = decision
                raise over_quota(decision)
        self._monitor.event(job, Transition.ADMITTED, self._clock())
        return decision

    def _started(self, quota: QuotaPolicy, job_id: JobId) -> None:
        """It no longer counts as queued. What a policy makes of that is its own affair."""
        try:
            self._runtime.started(quota, job_id)
        except Exception as error:
            self._monitor.fault("quota")
            _log.error("policy_failed", kind="quota", failure=log.describe(error))

    # -- how it ends ----------------------------------------------------------------------------------------------

    async def _refuse(self, visit: Visit, error: ApiError) -> None:
        """Tell the caller, in-band when the answer has begun. What it holds is given back first."""
        await self._settle(visit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                if not visit.reply.begun:
                    visit.reply.status = error.status
                    await send_error(visit.reply.send, error, visit.headers(self._clock()))
                elif not visit.reply.ended:
                    usage = visit.ticket.usage if visit.ticket is not None else Usage()
                    told = visit.format.failure(error, usage) if visit.format is not None else sse.error_event(error)
                    await visit.reply.end(told)

    async def _settle(self, visit: Visit) -> None:
        """Give back what is held. Cancelling the caller does not cancel it."""
        await asyncio.shield(self._settling_of(visit))

    def _settling_of(self, visit: Visit) -> asyncio.Task[None]:
        """The settlement, which is begun once."""
        if visit.settlement is None:
            visit.settlement = asyncio.create_task(self._settlement(visit), name="settle")
            self._settling.add(visit.settlement)
            visit.settlement.add_done_callback(self._settling.discard)
        return visit.settlement

    async def _settlement(self, visit: Visit) -> None:
        """End the ticket, then the reservation. Never raises: a failure is logged and counted, the lease runs out."""
        ticket, prepared = visit.ticket, visit.prepared
        if ticket is not None and prepared is not None and not ticket.done:
            dispatcher = self._dispatchers[prepared.job.model]
            dispatcher.cancel(ticket, visit.reason or "ended_early")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_GRACE_S):
                    await ticket.wait_done()
            dispatcher.abandon(ticket, visit.reason or "ended_early")
        job = prepared.job if prepared is not None else visit.errand
        if job is None or not visit.reserved:
            return
        usage = ticket.usage if ticket is not None else Usage()
        with visit.span("quota settle") as span:
            try:
                settling = self._runtime.settle(visit.policies.quota, job.id, usage, self._clock())
                figures = await within(self._timeouts.policy_s, settling)
                span.set(attributes.settled(usage, cast("int | None", figures.get("refunded"))))
            except Exception as error:
                span.fail("settle_failed")
                self._monitor.fault("settle")
                _log.error("settle_failed", request_id=visit.request_id, failure=log.describe(error))

    async def _leave(self, visit: Visit) -> None:
        """Settle whatever happened, then report. A cancellation that arrives meanwhile is passed on afterwards."""
        cancelled: asyncio.CancelledError | None = None
        while visit.settlement is None or not visit.settlement.done():
            try:
                await self._settle(visit)
            except asyncio.CancelledError as error:
                cancelled = error
        self._entrance.leave(visit)
        if visit.recording is not None:
            self.replays.close(visit.recording, good=visit.outcome == "ok" and visit.reply.ended)
        if visit.ticket is not None and visit.tenant is not None:
            sweep_behind(visit.ticket, visit.tenant, self._tenants)
        self._reporter.end(visit, self._dispatchers)
        if cancelled is not None:
            raise cancelled

    # -- small parts ----------------------------------------------------------------------------------------------

    def _format(self, visit: Visit, endpoint: Endpoint, ticket: Ticket) -> Format:
        assert visit.model is not None
        prepared = ticket.prepared
        return endpoint.format(
            job_id=prepared.job.id,
            model=visit.model.name if visit.adapter is None else visit.adapter.name,
            created=visit.created,
            revision=visit.model.revision,
            logprobs=prepared.request.params.logprobs,
            echo=prepared.echo,
            scored_prompt=prepared.prompt_tokens if prepared.request.params.prompt_logprobs else 0,
            include_usage=prepared.include_usage,
            request=prepared.request,
            call_form=lambda: ticket.call_form,
        )


def _retrieve(task: asyncio.Future[None]) -> None:
    """Look at how it ended, so that nobody warns of it; what matters of it was raised already."""
    if task.done() and not task.cancelled():
        task.exception()
