"""Limits, budgets and prices in the YAML. Money is exact: decimal in the file, whole billionths inside."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from gateway.settings_base import Mistake, Section
from policies.quota.limits import PER_UNIT
from policies.types import Limits, TokenPrice

MOST = 10**15
"""Largest limit: what buckets (floating point) and reports can still count exactly. Leave a limit out for none."""


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"write a number, not {str(value).lower()}")
    return value


Amount = Annotated[Decimal, BeforeValidator(_number), Field(ge=0, max_digits=18, decimal_places=9)]
"""A sum of money."""
Rate = Annotated[Decimal, BeforeValidator(_number), Field(ge=0, max_digits=12, decimal_places=3)]
"""Money per million tokens, in steps of a thousandth: then a single token costs whole billionths."""


class Budget(Section):
    """What a calendar month (UTC) may cost; null: no budget."""

    tokens_per_month: int | None = Field(None, ge=1, le=MOST)
    """Prompt and output tokens."""
    currency_per_month: Amount | None = None
    """Money, by the price table."""


class SharedLimits(Section):
    """Limits of an account at any level; an omitted one is unlimited."""

    requests_per_minute: int | None = Field(None, ge=1, le=MOST)
    tokens_per_minute: int | None = Field(None, ge=1, le=MOST)
    concurrent: int | None = Field(None, ge=1, le=MOST)
    requests_per_hour: int | None = Field(None, ge=1, le=MOST)
    requests_per_day: int | None = Field(None, ge=1, le=MOST)
    tokens_per_hour: int | None = Field(None, ge=1, le=MOST)
    tokens_per_day: int | None = Field(None, ge=1, le=MOST)
    input_tokens_per_minute: int | None = Field(None, ge=1, le=MOST)
    input_tokens_per_hour: int | None = Field(None, ge=1, le=MOST)
    input_tokens_per_day: int | None = Field(None, ge=1, le=MOST)
    output_tokens_per_minute: int | None = Field(None, ge=1, le=MOST)
    output_tokens_per_hour: int | None = Field(None, ge=1, le=MOST)
    output_tokens_per_day: int | None = Field(None, ge=1, le=MOST)
    queued: int | None = Field(None, ge=1, le=MOST)
    """Requests that wait for a worker."""
    kv_tokens: int | None = Field(None, ge=1, le=MOST)
    """Prompt + max output tokens of all its open requests."""
    budget: Budget = Budget()

    def to_limits(self) -> Limits:
        """The same values in the shape policies see."""
        money = self.budget.currency_per_month
        return Limits(
            **self.model_dump(exclude={"budget"}),
            tokens_per_month=self.budget.tokens_per_month,
            currency_per_month=None if money is None else int(money * PER_UNIT),
        )


class LimitsConfig(SharedLimits):
    """A tenant's limits: those of every level, and what one request may be."""

    max_output_tokens: int | None = Field(None, ge=1, le=MOST)
    max_context_tokens: int | None = Field(None, ge=1, le=MOST)


class KeyLimits(SharedLimits):
    """Limits of each of a tenant's credentials."""

    @field_validator("budget")
    @classmethod
    def _no_budget(cls, budget: Budget) -> Budget:
        if budget != Budget():
            raise ValueError(
                "a rotated key would begin a new budget; give it to users (user_limits), the tenant or its organisation"
            )
        return budget


class Organisation(Section):
    """Several tenants under common limits."""

    id: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$")
    limits: SharedLimits = SharedLimits()


class Price(Section):
    """What a million of a model's tokens cost."""

    input: Rate = Decimal(0)
    cached_input: Rate | None = None
    """Prompt tokens from the prefix cache; null: as ``input``."""
    output: Rate = Decimal(0)

    def to_price(self) -> TokenPrice:
        """The same in the shape policies see."""
        cached = self.input if self.cached_input is None else self.cached_input
        return TokenPrice(*(int(rate * PER_UNIT / 10**6) for rate in (self.input, cached, self.output)))


class Prices(Section):
    """What is charged for tokens, and what a device costs."""

    currency: str = Field("USD", min_length=1, max_length=16)
    """For reports; it is not converted."""
    models: dict[str, Price] = Field(default_factory=dict)
    """By model name; a model that is not listed costs nothing."""
    price_per_device_hour: Amount | None = None
    """What an hour of one device costs the operator, for cost reports."""


def unknown_models(prices: Prices, known: frozenset[str]) -> list[Mistake]:
    """A misspelt model must not be free."""
    names = ", ".join(sorted(known))
    return [
        (("prices", "models", name), f"unknown model {name!r} (known: {names})")
        for name in prices.models
        if name not in known
    ]
