"""What a served load consists of: tenants, lengths, arrivals; or a recorded log that is played again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from gateway.bench import load
from gateway.bench.report import BenchError

if TYPE_CHECKING:
    from gateway.simulate.lengths import Fixed, Lognormal, Uniform

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city community name president team "
    "minute idea body information back parent face others level office door health person art war history party "
    "result change morning reason research girl guy moment air teacher force education "
)
WORDS = tuple(_WORDS.split())
"""Mostly one token each in common vocabularies."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A caller with a key of its own."""

    name: str
    key: str = field(repr=False)
    share: float = 1.0
    """Part of the requests, relative to the others'."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to be sent."""

    tenant: int
    """Index into the tenants."""
    prompt: tuple[int, ...] | str
    input_tokens: int
    max_tokens: int
    at: float | None = None
    """Seconds from the start; None: when the closed loop has room."""


def tenants(keys: Sequence[str], shares: Sequence[float]) -> list[Tenant]:
    """From ``NAME=KEY`` or ``KEY``; a key ``env:VARIABLE`` is read from there. Raises BenchError."""
    if shares and len(shares) != len(keys):
        raise BenchError(f"--share has {len(shares)} figures for {len(keys)} keys; give one for each")
    if any(share <= 0 for share in shares):
        raise BenchError("--share: every share must be above 0")
    made = []
    for index, text in enumerate(keys):
        name, _, key = text.partition("=")
        if not key or not name.replace("-", "").replace("_", "").isalnum():
            name, key = f"tenant{index + 1}", text
        if key.startswith("env:"):
            variable = key.removeprefix("env:")
            if not (key := os.environ.get(variable, "")):
                raise BenchError(f"--api-key: the variable {variable} is not set")
        made.append(Tenant(name, key, shares[index] if shares else 1.0))
    if len({tenant.name for tenant in made}) != len(made):
        raise BenchError("--api-key: two keys have the same name")
    return made or [Tenant("default", "")]


def lengths(text: str, option: str) -> Fixed | Uniform | Lognormal:
    """``512``, ``8-32`` or ``lognormal:MEAN:SIGMA:MAX``. Raises BenchError naming the option."""
    from pydantic import ValidationError

    from gateway.simulate.lengths import Fixed, Lognormal, Uniform

    kind, *figures = text.split(":")
    low, dash, high = text.partition("-")
    try:
        if kind == "lognormal" and len(figures) == 3:
            mean, sigma, most = figures
            return Lognormal(kind="lognormal", mean=float(mean), sigma=float(sigma), max=int(most))
        if dash:
            return Uniform(kind="uniform", low=int(low), high=int(high))
        return Fixed(kind="fixed", value=int(text))
    except ValidationError as error:
        raise BenchError(f"{option} {text!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    except ValueError:
        raise BenchError(f"{option} {text!r}: write 512, 8-32 or lognormal:MEAN:SIGMA:MAX") from None


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts: token ids below ``vocab``, or words where the server takes text only."""

    vocab: int
    as_text: bool = False

    def make(self, label: str, tokens: int, prefix: tuple[str, int] | None = None) -> tuple[int, ...] | str:
        """Random ones for ``label``; with ``prefix`` (id, tokens) the beginning is the same for the same id."""
        if prefix is not None and prefix[0]:
            shared = min(prefix[1] or tokens // 2, tokens)
            head, rest = self._draw(f"prefix/{prefix[0]}", shared), self._draw(label, tokens - shared)
        else:
            head, rest = (), self._draw(label, tokens)
        whole = (*head, *rest)
        return " ".join(WORDS[token % len(WORDS)] for token in whole) if self.as_text else whole

    def _draw(self, label: str, tokens: int) -> tuple[int, ...]:
        return load.prompt(label, tokens, self.vocab) if tokens else ()


def synthetic(
    label: str,
    count: int,
    callers: Sequence[Tenant],
    prompts: Prompts,
    inputs: Fixed | Uniform | Lognormal,
    outputs: Fixed | Uniform | Lognormal,
    rate: float | None,
) -> list[Shot]:
    """``count`` requests, dealt to the tenants by share; with a ``rate`` as a Poisson process, else without times."""
    rng = Random(f"{label}/lengths")  # noqa: S311 - not a secret
    draw_input, draw_output = inputs.sampler(rng), outputs.sampler(rng)
    times = load.poisson(rate, count, f"{label}/arrivals") if rate is not None else None
    deal = load.dealt([caller.share for caller in callers])
    shots = []
    for index in range(count):
        given, wanted = draw_input(), draw_output()
        prompt = prompts.make(f"{label}/{index}", given)
        shots.append(Shot(deal(), prompt, given, wanted, times[index] if times is not None else None))
    return shots


def replayed(path: Path, label: str, callers: Sequence[Tenant], prompts: Prompts, speed: float) -> list[Shot]:
    """A request log (``forebay requests export``), ``speed`` times as fast. Raises BenchError.

    A tenant of the log uses the key of its name; tenants without one share the keys in turn, always the same one.
    """
    from gateway.simulate.traffic_log import TrafficLogError, read

    if speed <= 0:
        raise BenchError(f"--speed {speed:g} must be above 0")
    try:
        rows = read(path)
    except TrafficLogError as error:
        raise BenchError(str(error)) from None
    if not rows:
        raise BenchError(f"{path} holds no request")
    known = {caller.name: index for index, caller in enumerate(callers)}
    shots = []
    for index, row in enumerate(rows):
        caller = known.setdefault(row.tenant, len(known) % len(callers))
        prompt = prompts.make(f"{label}/{index}", row.prompt, (row.prefix, row.prefix_tokens))
        shots.append(Shot(caller, prompt, row.prompt, row.output, row.arrival / speed))
    return shots


def slots(concurrency: int, callers: Sequence[Tenant]) -> list[int]:
    """How many requests each tenant keeps under way in a closed loop: by share, at least one. Raises BenchError."""
    if concurrency < len(callers):
        raise BenchError(f"--concurrency {concurrency} is below the number of tenants ({len(callers)})")
    given = [1] * len(callers)
    while sum(given) < concurrency:
        given[min(range(len(given)), key=lambda index: ((given[index] + 1) / callers[index].share, index))] += 1
    return given
