"""Greedy ids equal transformers' on the same weights in fp32, whatever the engine does meanwhile.

The whole matrix {alone, mixed batch} x chunk x cache x pool runs 50 prompts on the real weights cut to 2 layers and
4,096 ids; the full model runs a part of it. Every cell asserts that what it is about did happen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.workers.model import oracle
from tests.workers.model.matrix import COMBINATIONS, GROUP, Cell, Models, model_of
from tests.workers.model.oracle import Case
from workers.model.loading import load
from workers.model_store import ModelFiles

PROMPTS, NEW_TOKENS = 50, 7


def _cell(together: bool, chunk: int, cache: str, tight: bool) -> Cell:
    """4 and 2 divide every prompt length; 3 leaves most with a partial last block. Small ones fill up sooner."""
    outgrown = together and tight
    size = 2 if outgrown else 4 if cache == "repeat" else 3
    return Cell(together, chunk, cache, tight, size, NEW_TOKENS if outgrown else 4)


CELLS = [_cell(*combination) for combination in COMBINATIONS]


def _cases(directory: Path, tokenizer: Path, vocab: int, count: int = PROMPTS) -> list[Case]:
    cases = oracle.greedy(directory, oracle.prompts(tokenizer, vocab, PROMPTS)[:count], NEW_TOKENS)
    clear = [len(case.expected) for case in cases]
    assert sum(tokens > 0 for tokens in clear) >= count - 2
    assert sum(clear) >= 0.95 * count * NEW_TOKENS
    return cases


@pytest.fixture(scope="session")
def cut_cases(smollm2_cut: Path) -> list[Case]:
    return _cases(smollm2_cut, smollm2_cut / "tokenizer.json", 4096)


@pytest.fixture(scope="session")
def full_cases(smollm2: ModelFiles) -> Callable[[int], list[Case]]:
    """So many of them; transformers is asked for no more than are wanted."""

    @cache
    def first(count: int) -> list[Case]:
        return _cases(smollm2.dir, smollm2.dir / "tokenizer.json", 49152, count)

    return first


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_on_cut_weights(cell: Cell, smollm2_cut: Path, cut_cases: list[Case], models: Models) -> None:
    """All 50 prompts in every cell, on torch's backend that serves."""
    cell.run(cut_cases, model_of(models, smollm2_cut, cell.engine("batched")), "batched")


ONCE_MORE = [
    cell for cell in CELLS if cell.together and (cell.chunk == 7 or (cell.chunk, cell.cache) == (64, "prefix"))
]


@pytest.mark.parametrize("cell", ONCE_MORE, ids=str)
def test_mixed_cells_on_the_reference_backend(
    cell: Cell, smollm2_cut: Path, cut_cases: list[Case], models: Models
) -> None:
    """All 50 prompts once more on the backend that the other is measured against."""
    cell.run(cut_cases, model_of(models, smollm2_cut, cell.engine("reference")), "reference")


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        pytest.param(_cell(True, 16, "prefix", True), PROMPTS, marks=pytest.mark.long),
        (_cell(True, 16, "prefix", True), GROUP),
        (_cell(True, 7, "repeat", False), GROUP),
        (_cell(False, 64, "cold", False), GROUP),
    ],
    ids=str,
)
def test_full_model(cell: Cell, count: int, smollm2: ModelFiles, full_cases: Callable[[int], list[Case]]) -> None:
    """All 30 layers and 49,152 ids, in cells that hold every kind of event; all prompts in the long one."""
    cell.run(full_cases(count), load(smollm2, cell.engine("batched")), "batched")
