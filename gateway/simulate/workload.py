"""A scenario's requests, in order of arrival, and what each looks like to policies and to an engine.

Rules
- Every tenant draws from streams of its own (arrivals, input, output, prefix), each seeded by scenario seed, tenant id
  and purpose: adding a tenant or changing one length leaves everybody else's traffic as it was.
- Requests are made one at a time while the run goes on, so a long run needs no memory for them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from random import Random

from gateway.simulate import traffic_log
from gateway.simulate.arrivals import Log
from gateway.simulate.scenario import Scenario, ScenarioTenant
from gateway.simulate.traffic_log import Row, TrafficLogError
from policies.types import CacheScope, Job, JobId, Limits, PrefixKey, Principal, TenantId
from workers.engine.block_hash import chain_keys
from workers.protocol import Generate, SamplingParams

MODEL = "simulated"
_PARAMS = SamplingParams(seed=0)
_FILLER = 7
_NO_SCOPE = CacheScope("none", b"")
_UNIQUE = 1 << 16
_VOCAB = 1 << 31


@dataclass(slots=True)
class Request:
    """One request to come."""

    number: int
    """Counts its tenant's requests from 0."""
    tenant: int
    """Position of its tenant in the scenario."""
    at: float
    prompt: int
    output: int
    """Tokens it will really produce."""
    group: int = -1
    """Which prefix its prompt begins with; -1: none."""
    prefix: int = 0
    """Tokens of that prefix."""


class Workload:
    """Requests of one scenario."""

    def __init__(self, scenario: Scenario, base_dir: Path, scope: Iterable[CacheScope] = ()) -> None:
        """``scope``: one per tenant, in order; without them prompts have no prefix keys. Raises TrafficLogError."""
        self._scenario = scenario
        self._logs = {
            tenant.arrivals.file: traffic_log.read(base_dir / tenant.arrivals.file)
            for tenant in scenario.tenants
            if isinstance(tenant.arrivals, Log)
        }
        for tenant in scenario.tenants:
            if isinstance(tenant.arrivals, Log) and not any(
                r.tenant == tenant.id for r in self._logs[tenant.arrivals.file]
            ):
                raise TrafficLogError(f"{tenant.arrivals.file}: has no request of tenant {tenant.id!r}")
        self._shapes = [_Shape(index, tenant, scenario) for index, tenant in enumerate(scenario.tenants)]
        for shape, cache_scope in zip(self._shapes, scope, strict=False):
            shape.scope = cache_scope

    def requests(self) -> Iterator[Request]:
        """Every request that arrives before the end, in order; of one moment, in the order of the tenants."""
        streams = [self._of(index, tenant) for index, tenant in enumerate(self._scenario.tenants)]
        return heapq.merge(*streams, key=attrgetter("at")) if len(streams) > 1 else streams[0]

    def job(self, request: Request) -> Job:
        """As policies see it."""
        return self._shapes[request.tenant].job(request)

    def generate(self, request: Request, job: Job) -> Generate:
        """As an engine sees it."""
        return self._shapes[request.tenant].generate(request, job)

    def _of(self, index: int, tenant: ScenarioTenant) -> Iterator[Request]:
        if isinstance(tenant.arrivals, Log):
            return _replayed(index, tenant, self._logs[tenant.arrivals.file], self._scenario.duration_s)
        return self._drawn(index, tenant)

    def _drawn(self, index: int, tenant: ScenarioTenant) -> Iterator[Request]:
        seed, arrivals = self._scenario.seed, tenant.arrivals
        assert tenant.input is not None
        assert tenant.output is not None
        assert not isinstance(arrivals, Log)
        prompt = tenant.input.sampler(stream(seed, tenant.id, "input"))
        output = tenant.output.sampler(stream(seed, tenant.id, "output"))
        times = arrivals.times(stream(seed, tenant.id, "arrivals"), self._scenario.duration_s)
        if tenant.prefix is None:
            for number, at in enumerate(times):
                yield Request(number, index, at, prompt(), output())
            return
        groups, tokens = stream(seed, tenant.id, "prefix"), tenant.prefix.tokens
        for number, at in enumerate(times):
            yield Request(
                number, index, at, tokens + prompt(), output(), groups.randrange(tenant.prefix.groups), tokens
            )


class _Shape:
    """What all requests of one tenant have in common."""

    def __init__(self, index: int, tenant: ScenarioTenant, scenario: Scenario) -> None:
        self.scope: CacheScope | None = None
        self._index = index
        self._tenant = tenant
        self._id = TenantId(tenant.id)
        self._limits: Limits = tenant.limits.to_limits()
        self._block_size = scenario.workers.block_size
        self._users = [f"{tenant.id}/{key}" for key in range(tenant.keys)]
        self._prompts: dict[int, list[int]] = {}
        self._starts: dict[tuple[int, int], list[int]] = {}

    def job(self, request: Request) -> Job:
        tenant, at = self._tenant, request.at
        job_id = f"{tenant.id}-{request.number}"
        keys: tuple[PrefixKey, ...] = ()
        scope = self.scope
        if scope is not None:
            made = chain_keys(scope.key, MODEL, None, self._tokens(request), self._block_size)
            keys = tuple(map(PrefixKey, made))
        return Job(
            JobId(job_id),
            self._id,
            MODEL,
            request.prompt,
            max(request.output, tenant.max_tokens or 0),
            at,
            tenant.weight,
            self._users[request.number % len(self._users)],
            service_class=tenant.class_,
            priority=tenant.priority,
            deadline=None if tenant.deadline_s is None else at + tenant.deadline_s,
            max_wait_s=tenant.max_wait_s,
            prefix_keys=keys,
            limits=self._limits,
            cache_scope=scope or _NO_SCOPE,
        )

    def generate(self, request: Request, job: Job) -> Generate:
        return Generate(
            job.id,
            self._tokens(request),
            job.max_tokens,
            _PARAMS,
            scope=b"" if self.scope is None else self.scope.key,
            tenant_key=job.tenant,
            weight=job.weight,
        )

    def _tokens(self, request: Request) -> list[int]:
        """The prompt: content matters only where prefixes are cached."""
        if self.scope is None:
            tokens = self._prompts.get(request.prompt)
            if tokens is None:
                tokens = self._prompts[request.prompt] = [_FILLER] * request.prompt
            return tokens
        tail = request.prompt - request.prefix
        own = [(_UNIQUE + request.number * 31 + self._index) % _VOCAB] + [_FILLER] * (tail - 1) if tail > 0 else []
        if request.group < 0:
            return own
        start = self._starts.get((request.group, request.prefix))
        if start is None:
            start = [1 + (request.group * 1009 + i) % (_UNIQUE - 1) for i in range(request.prefix)]
            self._starts[request.group, request.prefix] = start
        return start + own


def stream(seed: int, tenant: str, purpose: str) -> Random:
    """The random stream of one tenant for one purpose."""
    return Random(f"{seed}/{tenant}/{purpose}")  # noqa: S311 - a simulation, not a secret


def _replayed(index: int, tenant: ScenarioTenant, rows: list[Row], end: float) -> Iterator[Request]:
    groups: dict[str, int] = {}
    number = 0
    for row in rows:
        if row.tenant != tenant.id or row.arrival >= end:
            continue
        group = groups.setdefault(row.prefix, len(groups)) if row.prefix else -1
        prefix = min(row.prefix_tokens, row.prompt - 1) if group >= 0 else 0
        yield Request(number, index, row.arrival, row.prompt, row.output, group, prefix)
        number += 1


def principal(tenant: ScenarioTenant) -> Principal:
    """Its caller, for the cache scope."""
    return Principal(TenantId(tenant.id))
