"""The one place that states the order of a request.

    authenticate → look up tenant → read, parse, validate → look up model → prepare → admission → quota reserve
    → queue, route, dispatch → first token → stream or answer → settle

Rules
- A reservation that was asked for is settled exactly once, whatever await fails or is cancelled: at once where nothing
  has to be waited for, else by one task, which nobody's cancellation reaches. It ends the ticket first, so that usage
  is what really ran.
- Settling comes before the last byte, or right behind it where it is done at once (``settlement.py``): a caller that
  has its answer finds its slot free.
- From the whole body on, the caller is watched and the time limits run; either ends the work by ``Visit.cut``, wherever
  it waits. So does a reader that does not read (``delivery.py``).
- Nothing is sent before the first output or the failure is known. Afterwards a failure is an error event inside the
  stream; ``[DONE]`` is sent after success only.
- Policies are asked through ``gatekeeper.py``, which fails closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from gateway import log
from gateway import trace_attributes as attributes
from gateway.access import check_features
from gateway.arriving import Arriving
from gateway.cut import Deadline
from gateway.delivery import Delivery
from gateway.dispatch import Dispatcher
from gateway.entrance import Entrance
from gateway.errors import ApiError, bad_request, internal, timed_out
from gateway.gatekeeper import Gatekeeper, over_quota
from gateway.http import sse
from gateway.http.middleware import nobody_follows, request_id, send_error, when_gone
from gateway.http.openai import Format
from gateway.http.schemas import parse
from gateway.ids import new_id
from gateway.intake import Intake
from gateway.jobs import make_job
from gateway.models import Models
from gateway.monitor import Monitor
from gateway.purge import sweep_behind
from gateway.replays import Recording, Replays
from gateway.report import Reporter
from gateway.runtime import Runtime
from gateway.settings import Timeouts
from gateway.settlement import Settler
from gateway.tenants import Tenants
from gateway.ticket import Ticket
from gateway.visit import Endpoint, Errand, Reply, Visit, head
from gateway.within import within
from policies.spi import QuotaPolicy
from policies.types import Job, JobId, Principal, QuotaDecision, Transition, Usage

_log = log.get("pipeline")

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
        arriving: Arriving,
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
        self.arriving = arriving
        self._clock = clock
        self.settler = Settler(runtime, dispatchers, monitor, timeouts, clock)
        self._idle = asyncio.Event()
        self._idle.set()
        self.active = 0
        """Requests between their headers and their last byte."""

    def retime(self, timeouts: Timeouts) -> None:
        """Time limits of requests that arrive from now on."""
        self._timeouts = self.settler.timeouts = timeouts

    async def wait_idle(self) -> None:
        """Return when no request is here."""
        await self._idle.wait()

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
        job_id = JobId(new_id())
        job = visit.errand = make_job(visit.principal, visit.tenant, model.name, job_id, visit.arrived)
        visit.decision = await self._reserved(visit, job)
        with visit.span("tokenize"):
            answer = await self._intake.errand(visit.tenant, request.chars, partial(endpoint.answer, request, model))
        await self.settler.settle(visit)
        visit.trace.event("first_byte")
        await visit.reply.whole(200, head(visit.headers(self._clock())), answer)

    async def _inference(self, visit: Visit, endpoint: Endpoint, body: bytes) -> None:
        """What goes to a worker."""
        assert visit.tenant is not None
        request = visit.request = await parse(endpoint.parse, body)
        check_features(request.features(), visit.tenant.grants)
        self._entrance.choose(visit, request.model)
        visit.trace.tag(attributes.root, stream=request.stream)
        prepared = await self._entrance.admitted(visit)
        visit.decision = await self._reserved(visit, prepared.job)
        dispatcher = self._dispatchers[prepared.job.model]
        ticket = visit.ticket = dispatcher.submit(prepared, stream=request.stream, trace=visit.trace)
        ticket.on_dispatched = partial(self._started, visit.policies.quota, prepared.job.id)
        if nobody_follows(visit.scope):
            dispatcher.hasten()
        answer = visit.format = self._format(visit, endpoint, ticket)
        deliver = self.delivery.stream if request.stream else self.delivery.whole
        await deliver(visit, ticket, answer, self.settler.soon)
        visit.trace.event("last_byte")

    async def _authenticated(self, visit: Visit) -> Principal:
        with visit.span("auth") as span:
            principal = await self._gatekeeper.authenticate(visit.scope, visit.policies)
            span.set(attributes.auth, principal)
        return principal

    async def _body(self, visit: Visit) -> bytes:
        assert visit.principal is not None
        try:
            return await within(BODY_S, self.arriving.body(visit.principal, visit.receive))
        except TimeoutError:
            raise bad_request(
                f"The body did not arrive within {BODY_S:.0f} seconds.", code="body_timeout", status=408
            ) from None

    async def _supervised(self, visit: Visit, body: bytes) -> None:
        """Work until it is done, the caller leaves or the time is up. Raises ClientDisconnect, ApiError 504."""
        timeouts = self._timeouts
        first = visit.arrived + min(timeouts.first_token_s, timeouts.total_s)
        with visit.cut:
            deadline = Deadline(self._clock, first, partial(self._late, visit, timeouts))
            visit.gone = partial(self._gone, visit)
            unwatch = when_gone(visit.scope, visit.receive, visit.gone)
            try:
                await self._work(visit, body)
            finally:
                deadline.stop()
                unwatch()
                if visit.lingering is not None:
                    visit.lingering.cancel()

    def _late(self, visit: Visit, timeouts: Timeouts, now: float) -> float | None:
        """Its time is up, or will be when is returned."""
        silent = visit.request is not None and not (visit.ticket is not None and visit.ticket.began)
        if silent and now >= visit.arrived + timeouts.first_token_s:
            text = f"No output within {timeouts.first_token_s:g} seconds."
            visit.cut(timed_out(text, "first_token_timeout"))
            return None
        ends = visit.arrived + timeouts.total_s
        if now < ends:
            return ends
        text = f"The request took longer than {timeouts.total_s:g} seconds in all."
        visit.cut(timed_out(text, "total_timeout"))
        return None

    def _gone(self, visit: Visit) -> None:
        """The caller is; somebody else may wait for its answer, or it itself come again for it."""
        if visit.recording is None:
            visit.cut(ClientDisconnect())
        elif visit.lingering is None:
            visit.lingering = asyncio.create_task(self._deserted(visit, visit.recording), name="linger")

    async def _deserted(self, visit: Visit, recording: Recording) -> None:
        await recording.deserted(self.replays.settings.linger_s)
        visit.cut(ClientDisconnect())

    async def _reserved(self, visit: Visit, job: Job) -> QuotaDecision:
        """Take quota. Raises ApiError 429, 400 for what could never pass, 503 for a policy that fails."""
        with visit.span("quota reserve") as span:
            visit.reserved = True
            decision = await self._gatekeeper.reserve(job, visit.policies)
            span.set(attributes.quota, decision)
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
        await self.settler.settle(visit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                if not visit.reply.begun:
                    visit.reply.status = error.status
                    await send_error(visit.reply.send, error, visit.headers(self._clock()))
                elif not visit.reply.ended:
                    usage = visit.ticket.usage if visit.ticket is not None else Usage()
                    told = visit.format.failure(error, usage) if visit.format is not None else sse.error_event(error)
                    await visit.reply.end(told)

    async def _leave(self, visit: Visit) -> None:
        """Settle whatever happened, then report. A cancellation that arrives meanwhile is passed on afterwards."""
        cancelled: asyncio.CancelledError | None = None
        while not (visit.settled or (visit.settlement is not None and visit.settlement.done())):
            try:
                await self.settler.settle(visit)
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
