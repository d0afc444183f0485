"""The matrix {alone, mixed batch} x chunk x cache x pool: one cell run with real prompts against the oracle's ids.

A cell fails unless what it is about did happen: chunks of its size, hits, steps of prompts and decodes, preemptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.workers.model.harness import GREEDY, Bench, Finished
from tests.workers.model.oracle import Case
from workers.config import EngineConfig
from workers.model.loading import LoadedModel, load
from workers.protocol import Generate

GROUP = 10
"""Prompts of one mixed batch."""
BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the matrix."""

    together: bool
    chunk: int
    cache: str
    tight: bool
    block_size: int
    new_tokens: int
    """In a tight pool enough to outgrow what admission leaves each sequence."""

    def __str__(self) -> str:
        words = ("mixed" if self.together else "alone", self.chunk, self.cache, "tight" if self.tight else "roomy")
        return "-".join(map(str, words))

    def engine(self, attention: str, device: str = "cpu") -> EngineConfig:
        """fp32 on one thread."""
        return EngineConfig(
            dtype="float32",
            device=device,
            attention=attention,  # type: ignore[arg-type]
            block_size=self.block_size,
            blocks=BLOCKS,
            max_chunk_tokens=self.chunk,
            max_running=64,
            threads=1,
        )

    def run(self, cases: list[Case], model: LoadedModel, attention: str, device: str = "cpu") -> None:
        """Run all cases in this cell; raises AssertionError."""
        (mixed if self.together else alone)(self, cases, model, self.engine(attention, device))


COMBINATIONS = [
    (together, chunk, cache, tight)
    for together in (False, True)
    for chunk in (1, 7, 16, 64)
    for cache in ("cold", "prefix", "repeat")
    for tight in (False, True)
]
Models = dict[tuple[str, str, str, int], LoadedModel]


def model_of(models: Models, source: Path, engine: EngineConfig) -> LoadedModel:
    """Weights are loaded once per (source, backend, block size); each cell still gets its own engine and scope."""
    key = (str(source), engine.device, engine.attention, engine.block_size)
    if key not in models:
        models[key] = load(source, engine)
    return models[key]


def _generate(index: int, prompt: list[int], new_tokens: int, n: int = 1) -> Generate:
    """Every prompt has its own scope: what it hits is what it left itself."""
    scope = b"scope %d" % index
    return Generate(f"{index}-{new_tokens}-{len(prompt)}-{n}", prompt, new_tokens, GREEDY, n=n, scope=scope)


def _warm_up(cell: Cell, index: int, prompt: list[int]) -> Generate | None:
    """What runs before the prompt: nothing, another prompt that begins like it, or the prompt itself."""
    if cell.cache == "cold":
        return None
    if cell.cache == "repeat":
        return _generate(index, prompt, 1)
    shared = max(1, len(prompt) // cell.block_size // 2) * cell.block_size
    return _generate(index, [*prompt[:shared], (prompt[shared] + 1) % 4096], 1)


def _bench(cell: Cell, model: LoadedModel, engine: EngineConfig, blocks: int) -> Bench:
    return Bench("", engine.model_copy(update={"blocks": blocks if cell.tight else BLOCKS}), model)


def _worst(cell: Cell, prompt: list[int]) -> int:
    return -(-(len(prompt) + cell.new_tokens - 1) // cell.block_size)


def alone(cell: Cell, cases: list[Case], model: LoadedModel, engine: EngineConfig) -> None:
    """One request at a time. Where the pool is tight it has three choices, which drive each other out."""
    roomy = _bench(cell, model, engine, BLOCKS)
    choices = 3 if cell.tight else 1
    for index, case in enumerate(cases):
        bench = _bench(cell, model, engine, _worst(cell, case.prompt) + 1) if cell.tight else roomy
        first = _warm_up(cell, index, case.prompt)
        if first is not None:
            bench.run([first])
        bench.noted.chunks.clear()
        request = _generate(index, case.prompt, cell.new_tokens, choices)
        cached = _cached(bench.run([request])[0])
        for choice in range(choices):
            _same(bench.done[request.id, choice], case)
        if cell.cache == "cold":
            assert cached == 0
            assert max(bench.noted.chunks) == min(cell.chunk, len(case.prompt))
        else:
            assert 0 < cached <= len(case.prompt) - 1
            assert max(bench.noted.chunks) <= cell.chunk
        assert not cell.tight or bench.preemptions > 0
        assert bench.noted.widest <= choices


def mixed(cell: Cell, cases: list[Case], model: LoadedModel, engine: EngineConfig) -> None:
    """Ten requests that arrive one step after the other, so that prompts and decodes share steps."""
    hits = preemptions = shared = 0
    longest = max(len(case.prompt) for case in cases)
    for start in range(0, len(cases), GROUP):
        group = list(enumerate(cases))[start : start + GROUP]
        worst = [_worst(cell, case.prompt) for _, case in group]
        bench = _bench(cell, model, engine, max(max(worst) + 2, sum(worst) // 4))
        for index, case in group:
            if (first := _warm_up(cell, index, case.prompt)) is not None:
                bench.run([first])
        bench.noted.chunks.clear()
        group.reverse()  # the last to be warmed up is the last to be evicted: a tight pool still holds it
        found = bench.run([_generate(index, case.prompt, cell.new_tokens) for index, case in group], stagger=1)
        for (_, case), finished in zip(group, found, strict=True):
            _same(finished, case)
        hits += sum(_cached(finished) for finished in found)
        assert max(bench.noted.chunks) == cell.chunk or cell.cache != "cold" or cell.chunk > longest
        assert max(bench.noted.chunks) <= cell.chunk
        assert bench.noted.widest > 1
        shared += bench.noted.mixed_steps
        preemptions += bench.preemptions
    assert shared > 0
    assert (hits > 0) == (cell.cache != "cold")
    assert (preemptions > 0) == cell.tight


def _same(finished: Finished, case: Case) -> None:
    """The same ids, and log probabilities that show it was no near miss."""
    count = min(len(case.expected), len(finished.tokens))
    assert finished.tokens[:count] == case.expected[:count]
    assert finished.logprobs[:count] == pytest.approx(case.logprobs[:count], abs=1e-3)


def _cached(finished: Finished) -> int:
    assert finished.last is not None
    assert finished.last.finish == "length"
    return finished.last.prompt_cached
