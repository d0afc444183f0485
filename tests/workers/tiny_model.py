"""A Llama of one small layer with random weights, as a model directory; made without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.workers import tiny_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, CONTEXT = 32, 4, 2, 8, 48, 1024, 512


def write(
    directory: Path, template: str = tiny_tokenizer.CHATML, special: Sequence[str] = (), context: int = CONTEXT
) -> Path:
    """Write weights, config and tokenizer, which may have another template and more control tokens."""
    tiny_tokenizer.write(directory, template, special=special)
    random = np.random.default_rng(7)

    def weight(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.2).astype(np.float32)

    layer = {
        "self_attn.q_proj": weight(HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": weight(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": weight(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": weight(HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": weight(INNER, HIDDEN),
        "mlp.up_proj": weight(INNER, HIDDEN),
        "mlp.down_proj": weight(HIDDEN, INNER),
        "input_layernorm": np.ones(HIDDEN, np.float32),
        "post_attention_layernorm": np.ones(HIDDEN, np.float32),
    }
    tensors = {f"model.layers.0.{name}.weight": value for name, value in layer.items()}
    tensors["model.embed_tokens.weight"] = weight(VOCAB, HIDDEN)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
