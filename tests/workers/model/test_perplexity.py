"""Perplexity, and what keys and values in eight bits cost of it on a real text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

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
def text(smollm2: ModelFiles) -> list[int]:
    tokens = Tokenizer.load(smollm2.dir).encode_text(TEXT.read_text(encoding="utf-8"))
    assert 600 <= len(tokens) <= 1000
    return list(tokens)


@pytest.fixture(scope="module")
def exact(smollm2: ModelFiles, text: list[int]) -> torch.Tensor:
    """fp32 throughout."""
    return log_probabilities(loaded(smollm2), text)


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.01), ("fp8", 0.02)])
def test_quantised_keys_and_values_cost_little(
    kv_dtype: str, most: float, smollm2: ModelFiles, text: list[int], exact: torch.Tensor
) -> None:
    """Issue 7: perplexity within 1 % by int8. And no token's probability is far off."""
    found = log_probabilities(loaded(smollm2, kv_dtype=kv_dtype), text)
    change = math.exp((exact.mean() - found.mean()).item()) - 1
    moved = (found - exact).abs()
    assert moved.max() > 1e-4, "nothing was quantised"
    assert abs(change) <= most
    assert moved.mean() <= {"int8": 0.03, "fp8": 0.1}[kv_dtype]
