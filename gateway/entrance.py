"""From a parsed request to one that admission lets in: prepared for its model, or for less than it asked.

Rules
- Admission is asked with the finished job, before quota is touched. What it refuses, its ``fallback_model`` may take:
  where the tenant may use that model, the request fits it, a worker is ready and its own queue has room. Otherwise the
  caller gets the first refusal. There is no chain of fallbacks.
- Nothing is lessened silently: a header says which model answered, or what output was clamped to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from msgspec.structs import replace as with_fields

from gateway import placement
from gateway import trace_attributes as attributes
from gateway.dispatch import Dispatcher
from gateway.errors import ApiError
from gateway.gatekeeper import Gatekeeper, joined_headers, not_admitted
from gateway.ids import new_id
from gateway.intake import Intake, Prepared
from gateway.models import Models
from gateway.tenants import Tenants
from gateway.visit import Visit
from policies.types import AdmissionDecision, JobId

CLAMPED = "x-forebay-max-tokens-clamped"
FALLBACK = "x-forebay-fallback-model"


class Entrance:
    """Prepares requests and asks admission. One per gateway, without state of its own."""

    def __init__(
        self,
        *,
        models: Models,
        tenants: Tenants,
        intake: Intake,
        gatekeeper: Gatekeeper,
        dispatchers: Mapping[str, Dispatcher],
    ) -> None:
        self._models = models
        self._tenants = tenants
        self._intake = intake
        self._gatekeeper = gatekeeper
        self._dispatchers = dispatchers

    def choose(self, visit: Visit, name: str) -> None:
        """Find the model, and the adapter that it runs with, for what the caller asks for. Raises ApiError 403, 404."""
        assert visit.tenant is not None
        visit.model, visit.adapter = self._models.choose(name, visit.tenant)
        if visit.adapter is not None:
            self._models.adapters.take(visit.adapter)
            visit.taken.append(visit.adapter)
        adapter = visit.adapter.name if visit.adapter is not None else None
        visit.trace.tag(attributes.root, model=visit.model.name, adapter=adapter)

    def leave(self, visit: Visit) -> None:
        """The request is over."""
        while visit.taken:
            self._models.adapters.give_back(visit.taken.pop())

    async def admitted(self, visit: Visit) -> Prepared:
        """The request as it may join the queue of ``job.model``. Raises ApiError 400, 429, 503."""
        prepared = visit.prepared = await self._prepared(visit)
        decision = self._ask(visit, prepared)
        if not decision.admitted:
            prepared, decision = await self._elsewhere(visit, prepared, decision)
        if decision.clamp_max_tokens is not None:
            lessened = clamped(prepared, decision.clamp_max_tokens)
            if lessened is not prepared:
                with visit.span("admission") as span:
                    span.set(attributes.admission, decision, verdict="clamp")
            prepared = lessened
        visit.prepared = prepared
        return prepared

    async def _prepared(self, visit: Visit) -> Prepared:
        """The request for ``visit.model``."""
        assert visit.principal is not None
        assert visit.tenant is not None
        assert visit.request is not None
        assert visit.model is not None
        with visit.span("tokenize") as span:
            scope = visit.policies.cache_scope.scope(visit.principal, visit.tenant.scope_epoch)
            self._tenants.used(visit.tenant, scope.key)
            prepared = await self._intake.prepare(
                visit.request,
                principal=visit.principal,
                tenant=visit.tenant,
                model=visit.model,
                adapter=visit.adapter,
                scope=scope,
                job_id=JobId(new_id()),
                now=visit.arrived,
                headers=joined_headers(visit.scope),
            )
            span.set(attributes.tokenized, prepared.prompt_tokens)
        if (refusal := placement.refusal(visit.model.name, visit.model.config.pools, prepared.job)) is not None:
            raise refusal
        visit.trace.tag(attributes.root, job_id=prepared.job.id)
        return prepared

    def _ask(self, visit: Visit, prepared: Prepared) -> AdmissionDecision:
        dispatcher = self._dispatchers[prepared.job.model]
        return self._gatekeeper.admission(prepared.job, visit.policies, dispatcher)

    async def _elsewhere(
        self, visit: Visit, refused: Prepared, decision: AdmissionDecision
    ) -> tuple[Prepared, AdmissionDecision]:
        """The request for the fallback model, with that queue's decision. Raises the refusal of its own model."""
        found = await self._at(visit, decision.fallback_model, refused)
        with visit.span("admission") as span:
            span.set(attributes.admission, decision, verdict="fallback" if found else None)
            if found is None:
                raise not_admitted(refused.job, decision, self._dispatchers[refused.job.model])
        return found

    async def _at(self, visit: Visit, name: str | None, refused: Prepared) -> tuple[Prepared, AdmissionDecision] | None:
        """What the model ``name`` says to the request, or None where it does not take it."""
        own = visit.model, visit.adapter
        if name is None or name == refused.job.model or visit.tenant is None:
            return None
        try:
            self.choose(visit, name)
            prepared = await self._prepared(visit)
            decision = self._ask(visit, prepared)
        except ApiError:  # not for this tenant, not loaded, or too long for it
            decision = None
        if decision is not None and decision.admitted and self._dispatchers[name].ready_for(prepared.job):
            return replace(prepared, notes={**prepared.notes, FALLBACK: told(name)}), decision
        visit.model, visit.adapter = own
        visit.trace.tag(attributes.root, job_id=refused.job.id, model=refused.job.model, adapter=refused.job.adapter)
        return None


def told(name: str) -> str:
    """A model's name as a header can hold it: percent-encoded where it is not plain ASCII."""
    return name if name.isascii() else quote(name)


def clamped(prepared: Prepared, most: int) -> Prepared:
    """The request with at most ``most`` output tokens per choice, but not below its ``min_tokens``."""
    generate = prepared.generate
    limit = max(most, generate.params.min_tokens)
    if generate.max_tokens <= limit:
        return prepared
    return replace(
        prepared,
        job=replace(prepared.job, max_tokens=generate.lines * limit),
        generate=with_fields(generate, max_tokens=limit),
        limited_by=None,
        notes={**prepared.notes, CLAMPED: str(limit)},
    )
