"""config.json: what is understood, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.model.config import MoeConfig, RopeConfig, parse_config, read_config
from workers.model.llama import LlamaDecoder
from workers.model.registry import architecture
from workers.model_store import ModelStoreError

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> Any:
    return parse_config({**FIELDS, **changes}, generation or {}, "dir/config.json")


def test_defaults() -> None:
    config = parse()
    assert (config.kv_heads, config.head_dim, config.tied) == (4, 16, False)
    assert (config.rope, config.rms_eps, config.eos_ids) == (RopeConfig(), 1e-6, frozenset({2}))


def test_end_tokens_of_the_generation_config_win() -> None:
    assert parse({"eos_token_id": [5, 6]}).eos_ids == {5, 6}
    assert parse({"eos_token_id": 7}).eos_ids == {7}
    assert parse(eos_token_id=None).eos_ids == frozenset()


def test_both_spellings_of_rope() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    new = parse(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **llama3})
    assert old.rope == new.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)


def test_yarn_lengthens_the_context_that_a_file_names() -> None:
    """As Qwen tells its users to switch it on; and where the file names the whole context already."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for named in (512, 2048):
        made = parse(max_position_embeddings=named, rope_scaling=scaling)
        assert made.max_context == 2048
        assert (made.rope.kind, made.rope.factor, made.rope.original_context) == ("yarn", 4.0, 512)
        assert made.rope.attention == pytest.approx(1.1386294)
    told = parse(max_position_embeddings=2048, rope_scaling={**scaling, "factor": None, "attention_factor": 1.5}).rope
    assert (told.factor, told.attention) == (4.0, 1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"vocab_size": 0}, "vocab_size=0 must be a positive whole number"),
        ({"hidden_size": "64"}, "hidden_size='64' must be"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None must be"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 1.0}}, "beta_fast=1, beta_slow=1, .* makes no rotation"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": "yes"}, "attention_bias='yes' must be true or false"),
        ({"mlp_bias": 3}, "mlp_bias=3 must be true or false"),
        ({"sliding_window": 0}, "sliding_window=0 must be a positive whole number"),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention"]},
            "layer_types names 1 layers, num_hidden_layers=2",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_act": None, "hidden_activation": "silu"},
            "hidden_activation='silu' is not supported",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": -1},
            "query_pre_attn_scalar=-1 must be a positive number",
        ),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelStoreError, match=message) as caught:
        parse(**changes)
    assert str(caught.value).startswith("dir/config.json: ")


ROUTED = {
    "num_experts": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("MixtralForCausalLM", {}, MoeConfig(4, 2, 128, True)),
        ("Qwen2MoeForCausalLM", {}, MoeConfig(8, 2, 32, False, 48)),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}, MoeConfig(8, 2, 32, True)),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, MoeConfig(8, 2, 32, False, 0, frozenset({0}))),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1, 9]}, MoeConfig(8, 2, 32, False, 0, frozenset({1}))),
        ("Qwen3MoeForCausalLM", {"num_experts": None}, MoeConfig(4, 2, 32, False)),
        ("Qwen3ForCausalLM", {}, None),
    ],
)
def test_experts_of_the_families(architecture: str, changes: dict[str, Any], expected: MoeConfig | None) -> None:
    assert parse(architectures=[architecture], **{**ROUTED, **changes}).moe == expected


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("MixtralForCausalLM", {"num_local_experts": None}, "num_local_experts=None must be"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds num_local_experts=4"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 must be"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": 1.5}, "norm_topk_prob=1.5 must be true or false"),
    ],
)
def test_wrong_experts_are_named(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelStoreError, match=message):
        parse(architectures=[architecture], **{**ROUTED, **changes})


GEMMA = {"sliding_window": 8, "hidden_act": None, "rope_scaling": None}
QWEN = {"sliding_window": 64, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, (64, 64)),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("LlamaForCausalLM", {"sliding_window": 64}, (64, 64)),
        ("Qwen2ForCausalLM", {**QWEN, "use_sliding_window": False}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 64}, ()),
        ("Qwen2ForCausalLM", {**QWEN, "max_window_layers": 2}, ()),
        ("Qwen2ForCausalLM", {**QWEN, "max_window_layers": 1}, (0, 64)),
        ("Qwen3ForCausalLM", {**QWEN, "layer_types": ["full_attention", "full_attention"]}, ()),
        ("Qwen3ForCausalLM", {**QWEN, "layer_types": ["full_attention", "sliding_attention"]}, (0, 64)),
        ("Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 7}, (8, 8, 8, 8, 8, 0, 8)),
        ("Gemma3ForCausalLM", {**GEMMA, "sliding_window_pattern": 2}, (8, 0)),
        ("Gemma2ForCausalLM", GEMMA, (8, 0)),
        ("Qwen2MoeForCausalLM", {**ROUTED, **QWEN, "num_hidden_layers": 3}, (64, 0, 64)),
        ("Qwen3MoeForCausalLM", {**ROUTED, **QWEN}, (64, 64)),
    ],
)
def test_whose_window_counts(architecture: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse(architectures=[architecture], **changes).windows == windows


def test_gemma_turns_its_local_layers_otherwise() -> None:
    """Both spellings of the two rotations: the old fields, and a set of parameters for each kind of layer."""
    scaled = {"rope_type": "linear", "factor": 8.0}
    fields = {**GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 5e3, "rope_scaling": scaled}
    old = parse(architectures=["Gemma3ForCausalLM"], **fields)
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    new = parse(architectures=["Gemma3ForCausalLM"], **GEMMA, rope_parameters=kinds)
    for config in (old, new):
        assert (config.rope.theta, config.rope.kind, config.rope.factor) == (1e6, "linear", 8.0)
        assert config.local_rope == RopeConfig(theta=5e3)
        assert config.rope_of(0) == config.local_rope


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
        ("MixtralForCausalLM", {**ROUTED, "attention_bias": True}, (False, False, False, False)),
        ("Qwen2MoeForCausalLM", ROUTED, (True, False, False, False)),
        ("Qwen2MoeForCausalLM", {**ROUTED, "qkv_bias": False}, (False, False, False, False)),
        ("Qwen3MoeForCausalLM", ROUTED, (False, False, False, True)),
    ],
)
def test_biases_and_norms_of_the_families(
    architecture: str, changes: dict[str, Any], expected: tuple[bool, bool, bool, bool]
) -> None:
    config = parse(architectures=[architecture], **changes)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == expected


def test_unreadable_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelStoreError, match="cannot read the model's config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    assert read_config(tmp_path).layers == 2


def test_architectures_are_found_by_name() -> None:
    assert architecture("LlamaForCausalLM") is LlamaDecoder
    assert architecture("Mine", {"Mine": "workers.model.llama:LlamaDecoder"}) is LlamaDecoder


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("GPT2LMHeadModel", None, r"'GPT2LMHeadModel' is not supported \(supported: .*LlamaForCausalLM"),
        ("Mine", {"Mine": "nowhere.at_all:X"}, "registered as 'nowhere.at_all:X', which fails"),
        ("Mine", {"Mine": "workers.model.llama:X"}, "which fails"),
        ("Mine", {"Mine": "workers.model.llama"}, "not module:attribute"),
    ],
)
def test_a_bad_architecture_is_named(name: str, table: dict[str, str] | None, message: str) -> None:
    with pytest.raises(ModelStoreError, match=message):
        architecture(name, *([table] if table else []))
