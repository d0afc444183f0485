"""A scenario file: who asks for what, of which workers, under which policies. Unknown keys are errors, with paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gateway.settings import Queue
from gateway.settings_base import SettingsError
from gateway.settings_quota import LimitsConfig
from gateway.simulate.arrivals import Arrivals, Log, Part, Rate
from gateway.simulate.lengths import MAX_TOKENS, Lengths, Tokens
from policies.strict import WEIGHTS

Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Use(Part):
    """``{use: name, with: {...}}``, as in the gateway's configuration."""

    use: str
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


class StepCost(Part):
    """How long one step takes: either the three figures, or a calibration file that holds them."""

    base: Milliseconds = 0.0
    per_decode: Milliseconds = 0.0
    """Per sequence that gets one token."""
    per_prefill_token: Milliseconds = 0.0
    per_context_token: Milliseconds = 0.0
    """Per row and position before it that the row attends to."""
    twice_at: int | None = Field(None, ge=0, le=2**30)
    """At so many tokens of context a prompt's token takes twice as long as at the start, as the engine reckons when it
    cuts chunks (0: it never does). Without: ``per_prefill_token`` ÷ ``per_context_token``."""
    calibration: str | None = None
    """A JSON file with ``step_ms: {base, per_decode, …}``; relative to the scenario's folder."""

    @model_validator(mode="after")
    def _one_source(self) -> StepCost:
        figures = self.base or self.per_decode or self.per_prefill_token or self.per_context_token
        if self.calibration is not None and self.model_fields_set != {"calibration"}:
            raise ValueError("names a calibration file and figures; keep one of them")
        if self.calibration is None and not figures:
            raise ValueError("every figure is 0, so no step would take any time; set base")
        return self


class Workers(Part):
    """``count`` equal workers."""

    count: int = Field(1, ge=1, le=256)
    kv_tokens: int = Field(10_000, ge=2)
    """Whole blocks that fit are made."""
    block_size: int = Field(16, ge=1, le=256)
    max_running: int = Field(64, ge=1)
    max_step_tokens: int = Field(512, ge=1)
    max_chunk_tokens: int | None = Field(None, ge=1)
    prefix_cache: bool = False
    cache_share: float = Field(1.0, ge=0, le=1)
    mode: Literal["continuous", "static"] = "continuous"
    kv_cache_reuse: bool = True
    """False computes everything again in every step; for comparison."""
    step_ms: StepCost = Field(default_factory=lambda: StepCost(base=20, per_decode=0.15, per_prefill_token=0.25))

    @property
    def blocks(self) -> int:
        """Blocks of one worker."""
        return max(1, self.kv_tokens // self.block_size)


class Prefix(Part):
    """Prompts of one group begin with the same ``tokens`` tokens; each request is of one of ``groups`` groups."""

    groups: int = Field(ge=1, le=1_000_000)
    tokens: Tokens


class ScenarioTenant(Part):
    """One tenant and its traffic."""

    id: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$")
    weight: float = Field(1.0, ge=WEIGHTS[0], le=WEIGHTS[1])
    keys: int = Field(1, ge=1, le=100_000)
    """Over how many users (keys) its requests are spread, in turn."""
    arrivals: Arrivals
    input: Lengths | None = None
    output: Lengths | None = None
    """Tokens really produced."""
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """What its requests ask for at most; None: exactly what they produce."""
    prefix: Prefix | None = None
    class_: str = Field("interactive", alias="class")
    priority: int = 0
    max_wait_s: float | None = Field(None, gt=0)
    deadline_s: float | None = Field(None, gt=0)
    """Seconds from arrival."""
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _lengths_known(self) -> ScenarioTenant:
        recorded = isinstance(self.arrivals, Log)
        mistakes: list[tuple[tuple[str | int, ...], str]] = []
        for name, value in (("input", self.input), ("output", self.output)):
            if value is None and not recorded:
                mistakes.append(((name,), "is missing; give a length such as {kind: fixed, value: 256}"))
            if value is not None and recorded:
                mistakes.append(((name,), "is in the log already; remove it"))
        if mistakes:
            raise SettingsError(mistakes)
        return self


class Service(Part):
    """What a token counts in the figures of the report; by default as the scenario's policy charges it."""

    input_cost: float = Field(ge=0)
    output_cost: float = Field(ge=0)
    cached_cost: float = Field(0.0, ge=0)


class Scenario(Part):
    """The whole file."""

    description: str = ""
    seed: int = 1
    duration_s: float = Field(600.0, gt=0, le=1e7)
    drain: bool = False
    """Go on after ``duration_s``, without new arrivals, until every request has ended."""
    plugins: tuple[str, ...] = ()
    """Entry points to load, as in the gateway's configuration."""
    policy: Use = Use(use="vtc")
    admission: Use = Use(use="open")
    quota: Use = Use(use="unlimited")
    routing: Use = Use(use="least_loaded")
    queue: Queue = Queue()
    """Caps, as in the gateway's configuration."""
    service: Service | None = None
    workers: Workers = Workers()
    tenants: tuple[ScenarioTenant, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique_tenants(self) -> Scenario:
        first: dict[str, int] = {}
        mistakes: list[tuple[tuple[str | int, ...], str]] = []
        for i, tenant in enumerate(self.tenants):
            if first.setdefault(tenant.id, i) != i:
                mistakes.append(
                    (
                        ("tenants", i, "id"),
                        f"duplicate tenant id {tenant.id!r}, the same as number {first[tenant.id]} (counted from 0)",
                    )
                )
        if mistakes:
            raise SettingsError(mistakes)
        return self

    @property
    def costs(self) -> Service:
        """What a token counts in the report."""
        if self.service is not None:
            return self.service
        given = {key: self.policy.with_[key] for key in Service.model_fields if key in self.policy.with_}
        return Service(**{"input_cost": 1.0, "output_cost": 2.0, **given})


__all__ = ["Path", "Rate", "Scenario", "ScenarioTenant", "Service", "StepCost", "Use", "Workers"]
