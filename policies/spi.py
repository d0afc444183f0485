"""What a plugin author imports: the hook marker, the Protocols a policy implements, and ``PolicySpec`` to register one.

Colours are fixed: a Protocol's method is either async or sync, never "maybe". Scheduling, routing, admission and
cache_scope are synchronous and pure; auth and quota are async and may do I/O, within the time budget of their caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import pluggy
from pydantic import ConfigDict

from policies.quota_spi import (
    AccountsElsewhere,
    Durable,
    Json,
    KeyClaim,
    NeverWaits,
    QueueAware,
    QuotaAccounts,
    QuotaPolicy,
    QuotaView,
    SharedKeys,
    UsageReports,
)
from policies.strict import StrictScalars
from policies.types import (
    AdmissionDecision,
    AuthRequest,
    CacheScope,
    Charge,
    Job,
    JobEvent,
    JobId,
    Pick,
    Principal,
    QueueSnapshot,
    RequeueReason,
    RouteDecision,
    WorkerView,
)

PROJECT = "forebay"
ENTRY_POINT_GROUP = "forebay.plugins"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

T = TypeVar("T")
Kind = Literal["auth", "quota", "cache_scope", "scheduling", "routing", "admission"]
KINDS: tuple[Kind, ...] = ("auth", "quota", "cache_scope", "scheduling", "routing", "admission")


class AuthError(Exception):
    """The credential is missing or not valid: the caller gets 401. The message stays in the gateway's own log."""


class PolicyUnavailableError(Exception):
    """A policy's dependency is down: the caller gets 503 with Retry-After. Raising anything else does the same."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PolicyStartError(ValueError):
    """A policy cannot start as things are (a file in use, a folder that is not there); the message is for operators."""


class PolicyConfigError(ValueError):
    """A configuration is refused. A factory raises it with ``path`` relative to the policy's ``with:`` block.

    The registry raises it with every mistake in ``mistakes``: (path, message) pairs whose paths are relative to the
    policy's own block, e.g. ``use`` or ``with.output_cost``.
    """

    def __init__(self, message: str, path: str = "", mistakes: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.mistakes: tuple[tuple[str, str], ...] = tuple(mistakes) or ((path, message),)


class PolicyConfig(StrictScalars):
    """Base of every policy's config model: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class NoConfig(PolicyConfig):
    """For a policy without settings."""


class Shared:
    """Things that must exist once in a process (an open file with its thread), lent to the policies that need them.

    At a swap the new instance starts before the old one ends: both then have the same thing. On the event loop only.
    """

    def __init__(self) -> None:
        self._lent: dict[Hashable, tuple[Any, int]] = {}

    def take(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is lent under ``key``, made where nobody has it."""
        thing, users = self._lent.get(key, (None, 0))
        if not users:
            thing = make()
        self._lent[key] = (thing, users + 1)
        return cast("T", thing)

    def give_back(self, key: Hashable) -> bool:
        """It is no longer needed here; True for the last one, who closes it."""
        thing, users = self._lent.pop(key)
        if users > 1:
            self._lent[key] = (thing, users - 1)
        return users == 1


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a factory gets beside its config. Nothing else of the gateway is reachable from a policy."""

    env: Mapping[str, str] = field(default_factory=dict)
    """The process environment, for ``*_env`` settings: secrets come from env or files, never from YAML."""
    base_dir: str = "."
    """Folder of the YAML file; relative paths start here."""
    listen_host: str = "127.0.0.1"
    tenant_from_claims: Callable[[Mapping[str, Any]], str | None] | None = None
    """The ``forebay_tenant_from_claims`` hook, when a plugin implements it."""
    fetch_json: Callable[[str], Any] | None = None
    """An async HTTP GET that returns parsed JSON (for JWKS), injected by the gateway."""
    build: Callable[[Kind, str, Mapping[str, Any]], Any] | None = None
    """Builds another policy of the same registry, for composites (``chain``, ``hierarchical``)."""
    prepare: Callable[[Kind, str, Mapping[str, Any]], Callable[[], Any]] | None = None
    """Like ``build``, but checks once and returns what makes a new one per call: for composites that need many."""
    stored_keys: Callable[[bytes], Sequence[tuple[bytes, Principal]]] | None = None
    """API keys that the admin API made, for ``api_key``: by the first 8 bytes of a SHA-256, the whole hashes that begin
    so and whom each stands for until ``Principal.expires_at``. None: this gateway keeps none."""
    models: frozenset[str] = frozenset()
    """Names of the configured models, for settings that name one; empty: not known here."""
    server_secret: bytes = b""
    """Key of the cache scopes' HMAC."""
    state_dir: str | None = None
    """Folder for what must outlive the process; None: there is none."""
    shared: Shared = field(default_factory=Shared)
    """What instances of a policy have in common while one takes over from the other."""


@runtime_checkable
class AuthPolicy(Protocol):
    """Verifies a credential. Raising anything but AuthError, or overrunning the time budget, fails closed (503)."""

    async def authenticate(self, request: AuthRequest) -> Principal:
        """Return the verified caller. Raises AuthError (401) or PolicyUnavailableError (503)."""
        ...


@runtime_checkable
class Lifecycle(Protocol):
    """Optional for any policy: what it needs beside its calls (a connection, a key set, a task)."""

    async def start(self) -> None:
        """Called once before its first use. Raising keeps a start or a swap from happening."""
        ...

    async def close(self) -> None:
        """Called once after its last use, also after a failed ``start``."""
        ...


@runtime_checkable
class CacheScopePolicy(Protocol):
    """Decides in whose namespace a job's prefix blocks live. Pure: same principal and epoch, same scope."""

    def scope(self, principal: Principal, epoch: int) -> CacheScope:
        """The scope of this caller. ``epoch`` is the tenant's; bumping it makes the old scope unreachable."""
        ...


Fits = Callable[[Job], bool]
"""May this job be dispatched now? O(1), no side effect."""


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Order of the queue. No clock, no I/O, no logging, no randomness that is not seeded by config.

    Never loses, duplicates or starves a job. O(log n) per operation in queued jobs and tenants.
    """

    def push(self, job: Job, now: float) -> None:
        """Enqueue. Raises ValueError for an id that is already queued."""
        ...

    def pop(self, now: float, fits: Fits) -> Job | None:
        """Remove and return the job to run next; None when no tenant's next job fits.

        A head that does not fit must not block other tenants' heads.
        """
        ...

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """Put back a popped job at the front of its tenant's line; what it was charged stays charged."""
        ...

    def discard(self, job_id: JobId) -> bool:
        """Remove a queued job (client gone, expired). False when it is not queued."""
        ...

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """Account work that ran. Legal for a job this instance never popped (after a swap). ``final`` comes once."""
        ...

    def drain(self) -> list[Job]:
        """Remove and return all queued jobs, in an order whose replay through ``push`` keeps each tenant's order."""
        ...

    def dump(self) -> Json:
        """Service state (counters, weights) as JSON values; queued jobs are not part of it."""
        ...

    def load(self, state: Json) -> None:
        """Replace the counters by those of another policy's ``dump()``; unknown keys are ignored.

        Shared keys: ``service`` = {tenant: virtual service (cost / weight)}, ``prepaid`` = {job id: prompt tokens that
        were charged at dispatch and have not been reported yet}, ``prepaid_output`` = the same for predicted output
        tokens, ``waiting`` = [tenants that had queued jobs], ``lengths`` = [[tenant, model, recent output lengths]].
        """
        ...

    def explain(self, job: Job) -> Pick:
        """Why the job last popped was picked, in a few words for the trace. Legal right after ``pop`` returned it."""
        ...

    def __len__(self) -> int:
        """Queued jobs."""
        ...


@runtime_checkable
class Expiring(Protocol):
    """Optional for a scheduling policy: it gives up jobs that cannot be served in time any more.

    A policy has no clock and drops nothing silently: it names them, the queue core removes them with ``discard`` and
    their callers are told, as when a job's ``max_wait_s`` is over.
    """

    def expired(self, now: float) -> list[Job]:
        """Queued jobs to give up, none of them removed yet. Called often: O(log n) each, O(1) when there is none."""
        ...

    def next_expired(self) -> float | None:
        """When ``expired`` will next name one (may be early, never late); None while nothing can expire."""
        ...


@runtime_checkable
class RoutingPolicy(Protocol):
    """Picks one of the workers that can take the job now. May keep small bounded state (an index, a cursor)."""

    def choose(self, job: Job, workers: Sequence[WorkerView], now: float) -> RouteDecision:
        """``workers`` is never empty. Must return the name of one of them."""
        ...


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Refuses early what could not be served in time."""

    def check(self, job: Job, queue: QueueSnapshot, now: float) -> AdmissionDecision:
        """Decide before quota is touched."""
        ...


C = TypeVar("C", bound=PolicyConfig)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One registered policy: ``policies.<kind>: {use: <name>, with: <config>}``."""

    kind: Kind
    name: str
    config: type[PolicyConfig]
    factory: Callable[[Any, PolicyContext], Any]
    """Called with a validated ``config`` instance and the context; returns an object of the kind's Protocol."""
    summary: str = ""


@dataclass(frozen=True, slots=True)
class LauncherSpec:
    """One way to start workers: ``launch: {use: <name>, with: <config>}``. ``target`` is ``module:attribute``, imported
    when used and called once per pool with a context that has the validated ``config``."""

    name: str
    target: str
    summary: str = ""
    config: type[PolicyConfig] = NoConfig
    upstream: bool = False
    """Its workers are servers of somebody else: they take text instead of token ids (the model needs no ``source``),
    and their pools count as external unless their label ``external`` says otherwise."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model architecture a worker can load: what ``architectures`` in a model's config.json names.

    ``target`` is ``module:attribute``, so that listing models loads no torch; workers that a gateway starts are told
    of it, one that is started by hand with ``--architecture``. It is called with (``ModelConfig``, ``Weights``, longest
    context) and is a decoder as ``workers/model/llama.py`` has one.
    """

    architecture: str
    target: str
    summary: str = ""


PROTOCOLS: Mapping[Kind, type] = {
    "auth": AuthPolicy,
    "quota": QuotaPolicy,
    "cache_scope": CacheScopePolicy,
    "scheduling": SchedulingPolicy,
    "routing": RoutingPolicy,
    "admission": AdmissionPolicy,
}

__all__ = [
    "ENTRY_POINT_GROUP",
    "KINDS",
    "PROTOCOLS",
    "AccountsElsewhere",
    "AdmissionPolicy",
    "AuthError",
    "AuthPolicy",
    "CacheScopePolicy",
    "Durable",
    "Expiring",
    "Fits",
    "JobEvent",
    "Json",
    "KeyClaim",
    "Kind",
    "LauncherSpec",
    "Lifecycle",
    "ModelSpec",
    "NeverWaits",
    "NoConfig",
    "PolicyConfig",
    "PolicyConfigError",
    "PolicyContext",
    "PolicySpec",
    "PolicyStartError",
    "PolicyUnavailableError",
    "QueueAware",
    "QuotaAccounts",
    "QuotaPolicy",
    "QuotaView",
    "RoutingPolicy",
    "SchedulingPolicy",
    "Shared",
    "SharedKeys",
    "UsageReports",
    "hookimpl",
    "hookspec",
]
