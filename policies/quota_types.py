"""The words of quotas and accounting; ``policies.types`` has them too, and is where to import them from.

Frozen values, like everything there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Charge:
    """What a job cost *since the last charge*: only work that ran and that the caller benefits from.

    Recomputed tokens, rejected drafts and tokens past a stop are in none of the three.
    """

    prompt: int = 0
    """Prompt tokens computed."""
    cached: int = 0
    """Prompt tokens served from the prefix cache."""
    output: int = 0
    """Output tokens produced."""

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.prompt + other.prompt, self.cached + other.cached, self.output + other.output)

    def __sub__(self, other: Charge) -> Charge:
        return Charge(self.prompt - other.prompt, self.cached - other.cached, self.output - other.output)

    @property
    def total(self) -> int:
        """Tokens of all kinds."""
        return self.prompt + self.cached + self.output


Usage = Charge
"""A job's cumulative figures: the sum of its charges."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one account (an organisation, a tenant, a user, a key); None means unlimited.

    Rates refill continuously and hold one window's worth. ``tokens`` are prompt and output together.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    """Requests queued and running."""
    max_output_tokens: int | None = None
    """Of one request; the gateway sees to it, like to ``max_context_tokens``."""
    max_context_tokens: int | None = None
    requests_per_hour: int | None = None
    requests_per_day: int | None = None
    tokens_per_hour: int | None = None
    tokens_per_day: int | None = None
    input_tokens_per_minute: int | None = None
    input_tokens_per_hour: int | None = None
    input_tokens_per_day: int | None = None
    output_tokens_per_minute: int | None = None
    output_tokens_per_hour: int | None = None
    output_tokens_per_day: int | None = None
    queued: int | None = None
    """Requests that wait for a worker."""
    kv_tokens: int | None = None
    """Tokens of cache that its requests may come to need at once: prompt + max output of all that are open."""
    tokens_per_month: int | None = None
    """Budget of a calendar month (UTC)."""
    currency_per_month: int | None = None
    """Budget of a calendar month (UTC), in billionths of the currency."""


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """What a model's tokens cost, in billionths of the currency per token (a price per million tokens · 1000)."""

    input: int = 0
    cached: int = 0
    output: int = 0

    def cost(self, usage: Charge) -> int:
        """Billionths of the currency."""
        return usage.prompt * self.input + usage.cached * self.cached + usage.output * self.output

    def most(self, prompt_tokens: int, max_tokens: int) -> int:
        """The most that a request can cost: whatever part of its prompt is cached."""
        return prompt_tokens * max(self.input, self.cached) + max_tokens * self.output


@dataclass(frozen=True, slots=True)
class QuotaAccount:
    """One of the accounts that a job counts against. ``level``, ``tenant`` and ``name`` together are its identity."""

    level: str
    """``organisation``, ``tenant``, ``user`` or ``key``."""
    tenant: str
    """Whose user or key it is; the tenant itself; empty for an organisation."""
    name: str
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit as a caller may see it in ``x-ratelimit-*`` headers."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit of one account, with what is left of it."""

    level: str
    name: str
    limit: str
    """``tokens_per_minute`` …; a currency is in billionths."""
    maximum: int
    remaining: int
    reset_s: float | None
    """Seconds until nothing of it is used, if nothing more is; None where that depends on running requests."""


@dataclass(frozen=True, slots=True)
class QuotaDecision:
    """Answer of ``QuotaPolicy.reserve``. A refusal has taken nothing from any limit."""

    admitted: bool
    limit: str | None = None
    """Which limit refused: ``requests_per_minute``, ``tokens_per_minute``, ``concurrent`` …"""
    cost: int = 0
    retry_after_s: float | None = None
    """Seconds after which the same request would pass, all else equal; None with ``never``."""
    never: bool = False
    """True when it could not pass even with an idle, full quota: the caller gets 400, not an eternal 429."""
    remaining: Mapping[str, LimitState] = field(default_factory=dict)
    """Keys ``requests`` and ``tokens``, as in the headers: of all limits the one with the least left."""
    message: str | None = None
    """For the caller, with ``never``: which limit, by how much, and what would pass."""
    level: str | None = None
    """Whose limit that is: ``organisation``, ``tenant``, ``user`` or ``key``; None: the tenant's."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Nanoseconds of devices that one job took, by what they were good for."""

    computed_ns: int = 0
    """Tokens computed for the first time, in the attempt that answered."""
    recompute_ns: int = 0
    """Tokens computed again after a preemption."""
    retry_ns: int = 0
    """Attempts that ended without an answer."""

    def __add__(self, other: DeviceTime) -> DeviceTime:
        return DeviceTime(
            self.computed_ns + other.computed_ns,
            self.recompute_ns + other.recompute_ns,
            self.retry_ns + other.retry_ns,
        )

    @property
    def total_ns(self) -> int:
        """All of it."""
        return self.computed_ns + self.recompute_ns + self.retry_ns


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What the devices of one worker did on one day (UTC). The kinds of a worker add up to wall time · devices."""

    day: str
    model: str
    worker: str
    kind: str
    """``computed``, ``recompute``, ``retry``, ``idle`` …"""
    ns: int


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which part of the past is asked for. Days are UTC, ``YYYY-MM-DD``, both included."""

    first: str
    last: str
    group_by: tuple[str, ...] = ()
    """``organisation``, ``tenant``, ``user``, ``model``, ``class``, ``cost_centre``, ``day``; none: one row of sums."""
    only: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Values that these dimensions must have."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Sums of what was settled."""

    group: Mapping[str, str]
    requests: int
    prompt: int
    """Prompt tokens computed."""
    cached: int
    output: int
    cost: int
    """Billionths of the currency."""
    device: DeviceTime = field(default_factory=DeviceTime)
