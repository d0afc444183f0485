"""Where a prompt's attention costs as much as everything else, against what transformers' layers hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.workers.model import tiny
from workers.model.config import ModelConfig, parse_config, read_config
from workers.model.work import twice_at

HEADS, HEAD_DIM, LAYERS = 4, 8, 2


def shape(folder: Path, family: str, **changes: Any) -> tuple[ModelConfig, int]:
    """A model's configuration, and the numbers in its linears but for the head."""
    made = tiny.model(0, family, **changes)
    named = made.named_modules()
    weights = sum(one.weight.numel() for name, one in named if isinstance(one, nn.Linear) and name != "lm_head")
    return read_config(tiny.write_directory(made, folder / "m")), weights


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_linears_and_attention_are_equal_there(family: str, tmp_path: Path) -> None:
    """2 operations a weight; 4 a query's number and token of context, which take 4/3 as long."""
    model, weights = shape(tmp_path, family)
    at = twice_at(model, 256)
    attention = 4 * HEADS * HEAD_DIM * LAYERS * 4 / 3
    assert at * attention <= 2 * weights < (at + 1) * attention


def test_of_a_mixture_a_token_passes_its_own_experts(tmp_path: Path) -> None:
    dense, weights = shape(tmp_path, "qwen3", intermediate_size=80)
    changes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    (tmp_path / "moe").mkdir()
    mixed, _ = shape(tmp_path / "moe", "qwen3_moe", intermediate_size=80, **changes)
    router = 32 * 8
    assert twice_at(dense, 256) == weights * 3 // (8 * HEADS * HEAD_DIM * LAYERS)
    assert twice_at(mixed, 256) == (weights + router) * 3 // (8 * HEADS * HEAD_DIM * LAYERS)


def test_a_layer_with_a_window_costs_the_same_from_there_on(tmp_path: Path) -> None:
    """Half of the layers: twice as far. All of them, in a context that exceeds the window: nowhere."""
    every, _ = shape(tmp_path, "mistral", sliding_window=64)
    assert twice_at(every, 256) == 0
    assert twice_at(every, 64) > 0
    (tmp_path / "half").mkdir()
    half, _ = shape(tmp_path / "half", "qwen2", use_sliding_window=True, max_window_layers=1, sliding_window=64)
    assert twice_at(half, 256) == pytest.approx(2 * twice_at(half, 64), abs=1)


def test_the_bundled_model() -> None:
    """SmolLM2-135M: at 2,304 tokens."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    assert twice_at(parse_config(fields, {}, "config.json"), 8192) == 2304
