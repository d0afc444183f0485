"""When a tenant's requests arrive: one small model per kind, each with its generator of times.

Rules
- Times are seconds from the start of the run, ascending, below its end.
- A generator draws from the ``random.Random`` it is given and from nothing else: same seed, same times.
- A new kind is a class here and a name in ``Arrivals``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Part(BaseModel):
    """Base of the scenario's sections: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, use_attribute_docstrings=True)


class Poisson(Part):
    """Independent of each other, ``rate`` per second."""

    kind: Literal["poisson"]
    rate: Rate

    def times(self, rng: Random, end: float) -> Iterator[float]:
        """Exponential gaps."""
        return poisson(rng, self.rate, 0.0, end)


class Gamma(Part):
    """Gaps with coefficient of variation ``cv``: above 1 in bursts, below 1 more even than poisson."""

    kind: Literal["gamma"]
    rate: Rate
    cv: float = Field(gt=0, le=100)

    def times(self, rng: Random, end: float) -> Iterator[float]:
        """Gamma-distributed gaps with mean 1 / rate."""
        shape = 1.0 / self.cv**2
        scale = 1.0 / (self.rate * shape)
        at = rng.gammavariate(shape, scale)
        while at < end:
            yield at
            at += rng.gammavariate(shape, scale)


class OnOff(Part):
    """Poisson for ``on_s`` seconds, silent for ``off_s``, and again; the run begins with an ON phase."""

    kind: Literal["on_off"]
    rate: Rate
    on_s: Seconds
    off_s: Seconds

    def times(self, rng: Random, end: float) -> Iterator[float]:
        """One poisson stream per ON phase."""
        period = self.on_s + self.off_s
        for phase in range(math.ceil(end / period)):
            start = phase * period
            yield from poisson(rng, self.rate, start, min(end, start + self.on_s))


class Ramp(Part):
    """Poisson with a rate that changes linearly from ``from`` to ``to`` over the run."""

    kind: Literal["ramp"]
    from_: float = Field(alias="from", ge=0, le=1e6)
    to: float = Field(ge=0, le=1e6)

    def times(self, rng: Random, end: float) -> Iterator[float]:
        """Thinning (Lewis and Shedler, 1979): candidates at the highest rate, each kept with rate(t) / highest."""
        highest = max(self.from_, self.to)
        if highest <= 0:
            return
        slope = (self.to - self.from_) / end
        for at in poisson(rng, highest, 0.0, end):
            if rng.random() * highest < self.from_ + slope * at:
                yield at


class Window(Part):
    """Poisson from ``from_s`` to ``to_s`` only."""

    kind: Literal["window"]
    rate: Rate
    from_s: float = Field(ge=0)
    to_s: Seconds

    def times(self, rng: Random, end: float) -> Iterator[float]:
        """Exponential gaps inside the window."""
        return poisson(rng, self.rate, self.from_s, min(end, self.to_s))


class Burst(Part):
    """``count`` at once."""

    kind: Literal["burst"]
    count: int = Field(ge=1, le=10_000_000)
    at_s: float = Field(0.0, ge=0)

    def times(self, rng: Random, end: float) -> Iterator[float]:
        """All at ``at_s``."""
        if self.at_s < end:
            for _ in range(self.count):
                yield self.at_s


class Log(Part):
    """As recorded: the rows of this tenant in ``file`` (``forebay requests export``), with their lengths."""

    kind: Literal["log"]
    file: str
    """Relative to the scenario's folder."""


def poisson(rng: Random, rate: float, start: float, end: float) -> Iterator[float]:
    """Times in [start, end) with exponential gaps of mean 1 / rate."""
    gap = rng.expovariate
    at = start + gap(rate)
    while at < end:
        yield at
        at += gap(rate)


Arrivals = Annotated[Poisson | Gamma | OnOff | Ramp | Window | Burst | Log, Field(discriminator="kind")]
