"""Tiny random models of the Llama family on disk, as safetensors directory and as GGUF, for tests without language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from workers.model.gguf_unpack import _TOP, layer_names

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def config(family: str = "llama", **changes: Any) -> PreTrainedConfig:
    """A model of two layers; ``family`` is transformers' model_type, ``changes`` override its fields."""
    fields: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    return AutoConfig.for_model(family, **{**fields, **changes})


def model(seed: int = 0, family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random model in fp32 with weights large enough that its logits differ clearly."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(family, **changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            spread = 0.3 if "norm" in name else 0.15
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0))
    return made


def vocabulary() -> list[str]:
    """Three control tokens, the 256 byte symbols, then made-up merges up to 300 entries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isascii() and letter.isalpha()]
    merged = [first + second for first in letters[:5] for second in letters[5:14]]
    return (SPECIAL + alphabet + merged)[:300]


def write_directory(made: PreTrainedModel, directory: Path) -> Path:
    """Save as a model directory, with a tokenizer.json of the same vocabulary."""
    from workers.model.gguf_tokenizer import tokenizer_json_of

    made.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer_json_of(_tokenizer_metadata()), encoding="utf-8")
    return directory


def write_gguf(made: PreTrainedModel, path: Path, quantise: bool = False, **metadata: str) -> Path:
    """Save as GGUF; q and k of Llamas reordered as llama.cpp's converter does."""
    settings = made.config
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(settings.model_type, settings.model_type)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_key_length(getattr(settings, "head_dim", settings.hidden_size // settings.num_attention_heads))
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    rope = settings.rope_parameters.get("full_attention", settings.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(settings))
    if getattr(settings, "sliding_window", None):
        writer.add_sliding_window(settings.sliding_window)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(settings, cap, None):
            writer.add_float32(f"{architecture}.{cap}", getattr(settings, cap))
    tokenizer = _tokenizer_metadata()
    writer.add_tokenizer_model(tokenizer["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(tokenizer["tokenizer.ggml.pre"])
    writer.add_token_list(tokenizer["tokenizer.ggml.tokens"])
    writer.add_token_types(tokenizer["tokenizer.ggml.token_type"])
    writer.add_token_merges(tokenizer["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    for name, tensor in made.state_dict().items():
        if name == "lm_head.weight" and settings.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            array = _permute(array, settings.num_attention_heads)
        elif architecture == "llama" and "k_proj" in name:
            array = _permute(array, settings.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        named = _gguf_name(name, architecture)
        if quantise and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(named, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(named, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope_factors(settings: PreTrainedConfig) -> np.ndarray:
    """What transformers divides each pair's frequency by, as llama.cpp's converter writes it."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](settings, torch.device("cpu"))
    plain = settings.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
    return (plain / scaled).to(torch.float32).numpy()


def _permute(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf does to q and k: halves → interleaved pairs."""
    return array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape).copy()


def _gguf_name(name: str, architecture: str) -> str:
    for ours, theirs in _TOP.items():
        if theirs == name:
            return ours
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}." + next(ours for ours, theirs in layer_names(architecture).items() if theirs == rest)


def _tokenizer_metadata() -> dict[str, Any]:
    tokens = vocabulary()
    merges = [f"{token[0]} {token[1]}" for token in tokens if len(token) == 2]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
    }


def edit_json(path: Path, **changes: Any) -> None:
    """Overwrite fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
