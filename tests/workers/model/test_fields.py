"""Model files that say what cannot be: an error that names the file and the field, whatever is written there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.workers.model.test_config import FIELDS, GEMMA, QWEN, ROUTED
from workers.model.config import ModelConfig, parse_config, read_config
from workers.model.weights import SafetensorsSource
from workers.model_store import ModelStoreError

ODD: list[Any] = [None, True, "x", "", -1, 0, 1, 1.5, 10**30, 10**400, math.nan, math.inf, [], ["x"], [None], {}]
"""Values of every kind, at fields of every kind."""
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "truncate": True}
YARN |= {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7, "attention_factor": 1.2}
KINDS = {"full_attention": SCALED, "sliding_attention": {"rope_theta": 5e3}}
LARGEST: list[dict[str, Any]] = [
    {**FIELDS, "rope_theta": 5e5, "rope_scaling": SCALED, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    {**FIELDS, "rope_scaling": YARN, "max_position_embeddings": 2048},
    {**FIELDS, "architectures": ["Qwen2MoeForCausalLM"], **ROUTED, **QWEN, "max_window_layers": 1, "qkv_bias": True},
    {**FIELDS, "architectures": ["Qwen3MoeForCausalLM"], **ROUTED, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    {**FIELDS, "architectures": ["Gemma3ForCausalLM"], **GEMMA, "sliding_window_pattern": 2, "rope_parameters": KINDS},
    {**FIELDS, "architectures": ["Gemma3ForCausalLM"], **GEMMA, "rope_local_base_freq": 5e3, "layer_types": None},
    {**FIELDS, "architectures": ["Gemma2ForCausalLM"], **GEMMA, "query_pre_attn_scalar": 16, "layer_types": None},
]


def read(fields: Any, generation: Any = None) -> ModelConfig | None:
    """None: refused, by name."""
    try:
        return parse_config(fields, generation or {}, "dir/config.json")
    except ModelStoreError as error:
        said = str(error)
    assert said.startswith("dir/config.json: ")
    return None


@pytest.mark.parametrize("fields", LARGEST, ids=lambda fields: fields["architectures"][0])
def test_every_field_may_be_anything(fields: dict[str, Any]) -> None:
    assert read(fields) is not None
    for name, value in fields.items():
        for odd in ODD:
            read({**fields, name: odd})
            read({**fields, "tie_word_embeddings": odd, "use_sliding_window": odd, "dtype": odd})
        for inner in value if isinstance(value, dict) else ():
            for odd in ODD:
                read({**fields, name: {**value, inner: odd}})


def test_end_tokens_may_be_anything() -> None:
    for odd in ODD:
        read(FIELDS, {"eos_token_id": odd})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a positive number"),
        ({"rope_theta": math.nan}, "rope_theta=nan must be a positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object"),
        ({"rope_scaling": {**SCALED, "factor": None}}, None),
        ({"rope_scaling": {**SCALED, "factor": [8]}}, r"factor=\[8\] must be a positive number"),
        ({"rope_scaling": {**SCALED, "low_freq_factor": 4.0}}, "low_freq_factor=4 must be below high_freq_factor=4"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list of names"),
        ({"layer_types": [1, 2], "sliding_window": 8}, r"layer_types=\[1, 2\] must be a list of names"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>' must be an id or a list of ids"),
        ({"eos_token_id": [-1]}, r"eos_token_id=\[-1\] must be an id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 must be a positive whole number"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], message: str | None) -> None:
    fields = {**FIELDS, **changes}
    if message is None:
        assert read(fields) is not None
        return
    with pytest.raises(ModelStoreError, match=message):
        parse_config(fields, {}, "dir/config.json")


@pytest.mark.parametrize("text", ["[1]", "null", "{", "[" * 100_000, '"\\ud800'])
def test_files_that_hold_no_object(tmp_path: Path, text: str) -> None:
    good, bad = json.dumps(FIELDS), tmp_path / "model.safetensors.index.json"
    for config, generation in ((text, "{}"), (good, text)):
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "generation_config.json").write_text(generation)
        with pytest.raises(ModelStoreError, match="config"):
            read_config(tmp_path)
    bad.write_text(text)
    with pytest.raises(ModelStoreError, match="index"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": 3}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "gone.st"}}])
def test_an_index_that_names_no_files(tmp_path: Path, index: dict[str, Any]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelStoreError):
        SafetensorsSource(tmp_path)
