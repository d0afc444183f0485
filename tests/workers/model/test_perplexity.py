"""Perplexity, and what keys and values in eight bits cost of it on a real text."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gateway.bench.evals import tasks
from tests.arch.source import ROOT
from tests.workers.model import tiny
from workers.config import EngineConfig
from workers.model.loading import LoadedModel, load
from workers.model.perplexity import log_probabilities, perplexity
from workers.model_store import ModelFiles
from workers.tokenizer import Tokenizer

TEXT = ROOT / "tests" / "data" / "perplexity.txt"
"""About 750 tokens, written for this test: no model has read it."""


def loaded(source: Path | ModelFiles, attention: str = "native", **changes: object) -> LoadedModel:
    settings = {"device": "cpu", "dtype": "float32", "blocks": 64, "attention": attention, **changes}
    return load(source, EngineConfig.model_validate(settings))


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_it_is_what_transformers_computes(attention: str, tmp_path: Path) -> None:
    made = tiny.model(5, hidden_size=64, intermediate_size=64, head_dim=16)
    model = loaded(tiny.write_directory(made, tmp_path), attention)
    tokens = [(7 * index * index + 3 * index) % 290 for index in range(100)]
    with torch.inference_mode():
        loss = made(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.item()
    for chunk in (7, 128):
        assert perplexity(model, tokens, chunk) == pytest.approx(math.exp(loss), rel=1e-4)
    assert not model.runner.cache.data.any(), "the text is still there"


@pytest.mark.parametrize("count", [0, 1, 257])
def test_what_cannot_be_measured_is_named(count: int, tmp_path: Path) -> None:
    model = loaded(tiny.write_directory(tiny.model(hidden_size=64, intermediate_size=64, head_dim=16), tmp_path))
    with pytest.raises(ValueError, match=rf"a text of {count} tokens cannot be measured here; from 2 to 256 can"):
        perplexity(model, [5] * count)


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return Tokenizer.load(smollm2.dir)


@pytest.fixture(scope="module")
def exact(smollm2: ModelFiles) -> Callable[[list[int]], torch.Tensor]:
    """fp32 throughout; each text is read once."""
    model = loaded(smollm2)
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def look_up(tokens: list[int]) -> torch.Tensor:
        if tuple(tokens) not in known:
            known[tuple(tokens)] = log_probabilities(model, tokens)
        return known[tuple(tokens)]

    return look_up


LONGER = pytest.param(tasks.LANGUAGES, id="five languages", marks=pytest.mark.long)


@pytest.mark.parametrize("more", [pytest.param((), id="one"), LONGER])
@pytest.mark.parametrize(("kv_dtype", "moves"), [("int8", 0.03), ("fp8", 0.1)])
def test_quantised_keys_and_values_cost_little(
    kv_dtype: str,
    moves: float,
    more: tuple[str, ...],
    smollm2: ModelFiles,
    tokenizer: Tokenizer,
    exact: Callable[[list[int]], torch.Tensor],
) -> None:
    """Issue 7: perplexity changes by at most 1 %, also over the texts of ``forebay eval``. Tokens move little."""
    texts = [TEXT.read_text(encoding="utf-8"), *map(tasks.text, more)]
    tokens = [list(tokenizer.encode_text(text)) for text in texts]
    assert sum(map(len, tokens)) > (2000 if more else 600)
    model = loaded(smollm2, kv_dtype=kv_dtype)
    found = torch.cat([log_probabilities(model, text) for text in tokens])
    before = torch.cat([exact(text) for text in tokens])
    moved = (found - before).abs()
    assert moved.max() > 1e-4, "nothing was quantised"
    assert abs(math.exp((before.mean() - found.mean()).item()) - 1) <= 0.01
    assert moved.mean() <= moves
