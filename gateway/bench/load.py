"""What is asked of an engine: requests, when each comes, and how many may be under way. Standard library only.

A load is plain data and travels as JSON to a peer's driver process. Prompts are random token ids, drawn by a seed that
names the run, so that no two requests anywhere begin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

SPECIAL_IDS = 1000
"""Ids at either end of a vocabulary that prompts leave out, or a tenth of it if that is less: control tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. It comes at ``at``, or when another one has produced so many tokens."""

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    at: float = 0.0
    """Seconds from the start of the load."""
    after: tuple[str, int] | None = None
    """(id, k): not before that request's k-th token."""
    n: int = 1
    """Choices over the one prompt."""
    adapter: str | None = None
    """Digest of the LoRA adapter that answers it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival."""

    requests: tuple[Request, ...]
    concurrency: int | None = None
    """Closed loop: at most so many under way, the next one comes when one ends. None: each comes at its time."""
    keep_answers: bool = False
    """Whether timelines keep the tokens of the answers."""

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts; ``from_json`` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Load:
        """What ``to_json`` made, after a trip through JSON."""
        made = []
        for item in raw["requests"]:
            after = item["after"]
            tokens, after = tuple(item["tokens"]), None if after is None else (after[0], after[1])
            made.append(
                Request(item["id"], tokens, item["max_tokens"], item["at"], after, item["n"], item.get("adapter"))
            )
        return cls(tuple(made), raw["concurrency"], raw["keep_answers"])

    @property
    def longest(self) -> int:
        """Most prompt + output tokens of one request."""
        return max((len(request.tokens) + request.max_tokens for request in self.requests), default=0)


@dataclass(slots=True)
class Timeline:
    """What became of a request: seconds from the start of its load."""

    id: str
    input_tokens: int
    submitted: float = 0.0
    """When it was due: time that the client lost before sending counts as the server's."""
    times: list[float] = field(default_factory=list)
    """When each output token came; tokens that came together have the same time."""
    scheduled: float | None = None
    """When the engine took it out of its line; None where it does not say."""
    finished: float | None = None
    """When its end had come; None: with its last token."""
    output_tokens: int | None = None
    """Where the server counts them and does not send one message per token; None: as many as ``times``."""
    cached: int | None = None
    """Prompt tokens from the prefix cache; None where the engine does not say."""
    error: str | None = None
    tenant: str = ""
    answer: list[int] = field(default_factory=list)
    """Its tokens, where the load keeps answers."""
    longest_step: float = 0.0
    """Seconds of the engine's longest step since nothing was under way, until this one's end. 0: steps are not seen."""
    sent: float | None = None
    """When it went out; None where that is not told apart from when it was due."""

    @property
    def outputs(self) -> int:
        """Tokens produced."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def end(self) -> float | None:
        """Seconds from the start of the load; None when nothing ever came."""
        return self.finished if self.finished is not None else (self.times[-1] if self.times else None)

    def to_json(self) -> dict[str, Any]:
        """Times to the microsecond: they are most of what a driver sends."""
        return {**asdict(self), "times": [round(time, 6) for time in self.times]}


def prompt(label: str, length: int, vocab: int) -> tuple[int, ...]:
    """``length`` random ids below ``vocab``, the same for the same label. Raises ValueError for an empty one."""
    if length < 1:
        raise ValueError(f"input={length}: a prompt needs at least one token")
    margin = min(SPECIAL_IDS, vocab // 10)
    return tuple(Random(label).choices(range(margin, vocab - margin), k=length))  # noqa: S311 - not a secret


def uniform(label: str, count: int, input_tokens: int, output_tokens: int, vocab: int, concurrency: int | None) -> Load:
    """``count`` requests of one shape, all there at the start."""
    return Load(
        tuple(
            Request(f"{label}-{index}", prompt(f"{label}/{index}", input_tokens, vocab), output_tokens)
            for index in range(count)
        ),
        concurrency,
    )


def burst(label: str, count: int, inputs: tuple[int, int], outputs: tuple[int, int], vocab: int) -> Load:
    """``count`` requests at once, lengths drawn evenly from the two ranges (both ends included)."""
    rng = Random(f"{label}/lengths")  # noqa: S311
    shapes = [(rng.randint(*inputs), rng.randint(*outputs)) for _ in range(count)]
    return shaped(label, shapes, vocab)


def shaped(label: str, shapes: Iterable[tuple[int, int]], vocab: int) -> Load:
    """All at once, with these (input, output) lengths."""
    return Load(
        tuple(
            Request(f"{label}-{index}", prompt(f"{label}/{index}", given, vocab), wanted)
            for index, (given, wanted) in enumerate(shapes)
        )
    )


def interrupted(
    label: str, vocab: int, *, stream: tuple[int, int], prompts: int, length: int, at_token: int, answer: int = 8
) -> Load:
    """One stream of (input, output) tokens, and long prompts that all arrive when it has produced ``at_token``."""
    first = Request(f"{label}-stream", prompt(f"{label}/stream", stream[0], vocab), stream[1])
    others = [
        Request(f"{label}-{index}", prompt(f"{label}/{index}", length, vocab), answer, after=(first.id, at_token))
        for index in range(prompts)
    ]
    return Load((first, *others))


def common_prefix(label: str, count: int, prefix: int, own: int, output: int, vocab: int) -> Load:
    """One after the other: prompts that begin with the same ``prefix`` tokens and end with ``own`` of their own."""
    shared = prompt(f"{label}/prefix", prefix, vocab)
    return Load(
        tuple(
            Request(f"{label}-{index}", shared + prompt(f"{label}/{index}", own, vocab), output)
            for index in range(count)
        ),
        concurrency=1,
    )


def poisson(rate: float, count: int, seed: str) -> list[float]:
    """``count`` arrival times in seconds, a Poisson process of ``rate`` per second."""
    rng, now, times = Random(seed), 0.0, []  # noqa: S311
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def dealt(weights: Sequence[float]) -> Callable[[], int]:
    """Deals indexes in proportion to ``weights``, as evenly as can be: the one that is furthest behind is next."""
    given = [0.0] * len(weights)

    def deal() -> int:
        index = min(range(len(weights)), key=lambda i: ((given[i] + 1) / weights[i], i))
        given[index] += 1
        return index

    return deal
