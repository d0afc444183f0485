"""The words everyone shares: gateway, policies and plugins speak in these types and no others.

Rules
- Everything here is frozen. A policy sees values, never live objects of the gateway.
- No text, no token ids: a policy can decide without them, so it never gets them (privacy by construction).
- Times are seconds of one monotonic clock that the caller passes as ``now``; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NewType

from policies.quota_types import Charge as Charge
from policies.quota_types import DeviceTime as DeviceTime
from policies.quota_types import DeviceUse as DeviceUse
from policies.quota_types import Limits as Limits
from policies.quota_types import LimitState as LimitState
from policies.quota_types import LimitStatus as LimitStatus
from policies.quota_types import QuotaAccount as QuotaAccount
from policies.quota_types import QuotaDecision as QuotaDecision
from policies.quota_types import TokenPrice as TokenPrice
from policies.quota_types import Usage as Usage
from policies.quota_types import UsageQuery as UsageQuery
from policies.quota_types import UsageRow as UsageRow

EXTERNAL = "external"
"""The label of pools that are outside this installation, where it says ``"true"``."""

JobId = NewType("JobId", str)
TenantId = NewType("TenantId", str)
PrefixKey = NewType("PrefixKey", bytes)
"""One link of the scoped prefix chain (DESIGN §7): a keyed digest, useless to anybody without the server secret."""

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, as the auth policy verified it. Nothing in a request body or another header can change it."""

    tenant: TenantId
    user: str | None = None
    groups: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()
    method: str = "none"
    key_id: str | None = None
    """A short hash that names the credential in spans and audit, never the credential."""
    expires_at: float | None = None
    """Unix time at which the credential ends; None when it does not."""


@dataclass(frozen=True, slots=True)
class AuthRequest:
    """What an auth policy may look at. Header names are lower case."""

    headers: Mapping[str, str]
    """Several of one name are one here, with commas between."""
    client_host: str | None = None
    repeated: frozenset[str] = frozenset()
    """Names of those that came more than once."""

    @property
    def bearer(self) -> str | None:
        """The credential of ``Authorization: Bearer …``, or None."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None


@dataclass(frozen=True, slots=True)
class CacheScope:
    """The namespace in which a job's prefix blocks live. ``key`` = HMAC(server secret, tenant ‖ name ‖ epoch)."""

    name: str
    key: bytes
    public: bool = False
    """Blocks inside a prefix that the operator registered as public are shared with everybody in such a scope."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request as policies see it. Made once, by gateway.intake; never changed afterwards."""

    id: JobId
    tenant: TenantId
    model: str
    prompt_tokens: int
    max_tokens: int
    """Most output tokens it may produce, over all its choices."""
    arrived_at: float
    weight: float = 1.0
    user: str | None = None
    key_id: str | None = None
    """A short hash that names the credential (``Principal.key_id``); for fairness between a tenant's keys."""
    groups: frozenset[str] = frozenset()
    service_class: str = "interactive"
    priority: int = 0
    """Higher goes first, for policies that look at it. From the class; a caller may only lower it."""
    deadline: float | None = None
    max_wait_s: float | None = None
    """Longest time it may queue; the queue core expires it afterwards."""
    adapter: str | None = None
    """Name of the LoRA adapter that it runs with, over ``model``."""
    adapter_digest: str | None = None
    """Its content: what a worker must have loaded."""
    requires: Mapping[str, str] = field(default_factory=lambda: _NO_LABELS)
    """Labels a worker pool must carry to run it."""
    allow_external: bool = False
    """May it run in a pool that is outside this installation?"""
    cache_scope: CacheScope = field(default_factory=lambda: CacheScope("none", b""))
    prefix_keys: tuple[PrefixKey, ...] = ()
    """Chain keys of the prompt's full blocks, first to last, for locality and affinity."""
    limits: Limits = field(default_factory=Limits)
    """The tenant's own."""
    accounts: tuple[QuotaAccount, ...] = ()
    """Every account it counts against, the tenant's included; empty: the tenant's alone, with ``limits``."""
    price: TokenPrice | None = None
    organisation: str | None = None
    cost_centre: str | None = None
    """Who pays, for reports."""

    @property
    def served(self) -> str:
        """What it is billed as: its model, or ``<model>:<adapter>``."""
        return self.model if self.adapter is None else f"{self.model}:{self.adapter}"

    @property
    def total_tokens(self) -> int:
        """Most tokens it can occupy: what quota reserves and what must fit in a worker."""
        return self.prompt_tokens + self.max_tokens


class RequeueReason(StrEnum):
    """Why a popped job comes back to the queue."""

    WORKER_LOST = "worker_lost"
    WORKER_REFUSED = "worker_refused"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """What an admission policy may look at; the queue core makes it in O(1)."""

    queued: int
    queued_tenant: int
    queued_tokens: int
    """Prompt + max output tokens of all queued jobs."""
    queued_tokens_tenant: int
    tenant_share: float
    """The tenant's weight over the weights of tenants with queued work, itself included; in (0, 1]."""
    service_rate: float | None
    """Tokens per second the model's workers lately delivered; None before there is a measurement."""
    workers_ready: int
    used_ratio: float | None = None
    """Part of prompt + max output tokens that jobs which ended of late really took; None before a few have ended."""


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """Answer of ``AdmissionPolicy.check``."""

    admitted: bool
    reason: str | None = None
    """Machine-readable, a label of ``forebay_shed_total``: ``queue_full``, ``tenant_queue_full`` …"""
    retry_after_s: float | None = None
    predicted_wait_s: float | None = None
    clamp_max_tokens: int | None = None
    """With an admitted job: most output tokens per choice it may have; the caller is told in a header."""
    fallback_model: str | None = None
    """With a refused one: the model that may take it instead, if the tenant may use it and it has room."""


def kv_blocks(tokens: int, block_size: int, keeps: Sequence[int] = ()) -> int:
    """KV blocks that a sequence of so many tokens holds at once.

    ``keeps``: for a model with windows, how many latest tokens each of a sequence's block tables keeps, 0 = all.
    """
    whole = -(-tokens // block_size)
    if not keeps:
        return whole
    return sum(min(whole, keep // block_size + 2) if keep else whole for keep in keeps)


def kv_tokens(blocks: int, block_size: int, keeps: Sequence[int], most: int) -> int:
    """Tokens, at most ``most``, of the longest sequence whose ``kv_blocks`` are not more than ``blocks``."""
    if not keeps:
        return min(most, blocks * block_size)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = kv_blocks(middle, block_size, keeps) <= blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as a routing policy sees it. Figures are the worker's last report plus what was dispatched since."""

    name: str
    model: str
    pool: str
    labels: Mapping[str, str] = field(default_factory=lambda: _NO_LABELS)
    classes: frozenset[str] = frozenset()
    """Service classes its pool is kept for; empty: all."""
    inflight: int = 0
    inflight_tokens: int = 0
    """Tokens still owed to dispatched jobs (prompt + max output − produced)."""
    waiting: int = 0
    max_running: int = 1
    free_blocks: int = 0
    """Free + cached blocks: both can take new work."""
    total_blocks: int = 0
    block_size: int = 16
    keeps: tuple[int, ...] = ()
    """As ``kv_blocks``'."""
    hot_prefixes: frozenset[PrefixKey] = frozenset()
    adapters: frozenset[str] = frozenset()
    """Digests of the adapters that it has loaded."""
    stale_s: float = 0.0
    """Age of the last report."""


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Answer of ``RoutingPolicy.choose``."""

    worker: str
    reason: str
    """``prefix``, ``load`` or ``only``."""
    prefix_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pick:
    """What a scheduling policy says of the job it just popped, for the trace: never used to decide."""

    picked_because: str
    virtual_start: float | None = None


class Transition(StrEnum):
    """The transitions of a job that observers hear of."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a transition, not a password
    FINISHED = "finished"
    SHED = "shed"


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One transition of one job. ``outcome`` and ``usage`` are set on the last one only."""

    job: Job
    transition: Transition
    at: float
    worker: str | None = None
    outcome: str | None = None
    reason: str | None = None
    usage: Usage | None = None
