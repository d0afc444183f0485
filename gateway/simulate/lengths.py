"""How long prompts and answers are, in tokens: one small model per kind, each draws one length at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gateway.simulate.arrivals import Part

MAX_TOKENS = 1_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Draw = Callable[[], int]


class Fixed(Part):
    """Always ``value``."""

    kind: Literal["fixed"]
    value: Tokens

    def sampler(self, rng: Random) -> Draw:
        """Draws nothing from ``rng``."""
        value = self.value
        return lambda: value


class Uniform(Part):
    """Every whole number from ``low`` to ``high`` equally often."""

    kind: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high}); swap them")
        return self

    def sampler(self, rng: Random) -> Draw:
        """Whole numbers, both ends included."""
        low, span, draw = self.low, self.high - self.low + 1, rng.random
        return lambda: low + int(draw() * span)


class Lognormal(Part):
    """Mean ``mean``, ``sigma`` of the logarithm; rounded, at least 1, cut at ``max``."""

    kind: Literal["lognormal"]
    mean: float = Field(gt=0, le=MAX_TOKENS)
    sigma: float = Field(ge=0, le=5)
    max: Tokens

    def sampler(self, rng: Random) -> Draw:
        """``mean`` is that of the distribution before rounding and cutting."""
        mu, sigma, most = math.log(self.mean) - self.sigma**2 / 2, self.sigma, self.max
        draw = rng.lognormvariate
        return lambda: min(most, max(1, round(draw(mu, sigma))))


class Empirical(Part):
    """Every one of ``values`` equally often: what ``forebay requests export --synthesise`` recorded."""

    kind: Literal["empirical"]
    values: tuple[Tokens, ...] = Field(min_length=1, max_length=10_000)

    def sampler(self, rng: Random) -> Draw:
        """Independent draws."""
        values, count, draw = self.values, len(self.values), rng.random
        return lambda: values[int(draw() * count)]


Lengths = Annotated[Fixed | Uniform | Lognormal | Empirical, Field(discriminator="kind")]
