"""Greedy ids equal transformers' on the same weights in fp32, whatever the engine does meanwhile.

The whole matrix {alone, mixed batch} x chunk x cache x pool runs 50 prompts on the real weights cut to 2 layers and
4,096 ids; the full model runs a part of it. Every cell asserts that what it is about did happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.workers.model import oracle
from tests.workers.model.harness import GREEDY, Bench, Finished
from tests.workers.model.oracle import Case
from workers.config import EngineConfig
from workers.model.loading import LoadedModel, load
from workers.model_store import ModelFiles
from workers.protocol import Generate

PROMPTS, NEW_TOKENS = 50, 7
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

    @property
    def block_size(self) -> int:
        """4 and 2 divide every prompt length; 3 leaves most with a partial last block. Small ones fill up sooner."""
        if self.together and self.tight:
            return 2
        return 4 if self.cache == "repeat" else 3

    @property
    def new_tokens(self) -> int:
        """Long enough to outgrow the one spare block that admission leaves each sequence."""
        return NEW_TOKENS if self.together and self.tight else 4

    def engine(self, attention: str) -> EngineConfig:
        return EngineConfig(
            dtype="float32",
            device="cpu",
            attention=attention,  # type: ignore[arg-type]
            block_size=self.block_size,
            blocks=BLOCKS,
            max_chunk_tokens=self.chunk,
            max_running=64,
            threads=1,
        )


CELLS = [
    pytest.param(
        Cell(together, chunk, cache, tight),
        id="-".join(["mixed" if together else "alone", str(chunk), cache, "tight" if tight else "roomy"]),
    )
    for together in (False, True)
    for chunk in (1, 7, 16, 64)
    for cache in ("cold", "prefix", "repeat")
    for tight in (False, True)
]


def _cases(directory: Path, tokenizer: Path, vocab: int) -> list[Case]:
    cases = oracle.greedy(directory, oracle.prompts(tokenizer, vocab, PROMPTS), NEW_TOKENS)
    clear = [len(case.expected) for case in cases]
    assert sum(count > 0 for count in clear) >= PROMPTS - 2
    assert sum(clear) >= 0.95 * PROMPTS * NEW_TOKENS
    return cases


@pytest.fixture(scope="session")
def cut_cases(smollm2_cut: Path) -> list[Case]:
    return _cases(smollm2_cut, smollm2_cut / "tokenizer.json", 4096)


@pytest.fixture(scope="session")
def full_cases(smollm2: ModelFiles) -> list[Case]:
    return _cases(smollm2.dir, smollm2.dir / "tokenizer.json", 49152)


@pytest.fixture(scope="session")
def models() -> dict[tuple[str, str, int], LoadedModel]:
    return {}


def _model(models: dict[tuple[str, str, int], LoadedModel], source: Path, engine: EngineConfig) -> LoadedModel:
    """Weights are loaded once per (source, backend, block size); each cell still gets its own engine and scope."""
    key = (str(source), engine.attention, engine.block_size)
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


def _alone(cell: Cell, cases: list[Case], model: LoadedModel, engine: EngineConfig) -> None:
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


def _mixed(cell: Cell, cases: list[Case], model: LoadedModel, engine: EngineConfig) -> None:
    """Ten requests that arrive one step after the other, so that prompts and decodes share steps."""
    hits = preemptions = mixed = 0
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
        assert max(bench.noted.chunks) == cell.chunk or cell.cache != "cold" or cell.chunk > 40
        assert max(bench.noted.chunks) <= cell.chunk
        assert bench.noted.widest > 1
        mixed += bench.noted.mixed_steps
        preemptions += bench.preemptions
    assert mixed > 0
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


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_on_cut_weights(
    cell: Cell, smollm2_cut: Path, cut_cases: list[Case], models: dict[tuple[str, str, int], LoadedModel]
) -> None:
    """All 50 prompts in every cell, on the backend that serves."""
    engine = cell.engine("batched")
    run = _mixed if cell.together else _alone
    run(cell, cut_cases, _model(models, smollm2_cut, engine), engine)


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if cell.values[0].together and cell.values[0].chunk in (7, 64)]
)
def test_mixed_cells_on_the_reference_backend(
    cell: Cell, smollm2_cut: Path, cut_cases: list[Case], models: dict[tuple[str, str, int], LoadedModel]
) -> None:
    """All 50 prompts once more on the backend that the other is measured against."""
    engine = cell.engine("reference")
    _mixed(cell, cut_cases, _model(models, smollm2_cut, engine), engine)


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        pytest.param(Cell(True, 16, "prefix", True), PROMPTS, id="mixed-16-prefix-tight"),
        pytest.param(Cell(True, 7, "repeat", False), 2 * GROUP, id="mixed-7-repeat-roomy"),
        pytest.param(Cell(False, 64, "cold", False), 14, id="alone-64-cold-roomy"),
    ],
)
def test_full_model(cell: Cell, count: int, smollm2: ModelFiles, full_cases: list[Case]) -> None:
    """All 30 layers and 49,152 ids, in cells that between them hold every kind of event; in one of them all prompts."""
    engine = cell.engine("batched")
    run = _mixed if cell.together else _alone
    run(cell, full_cases[:count], load(smollm2, engine), engine)
