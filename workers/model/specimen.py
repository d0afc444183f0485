"""Models and adapters with random weights, written to a folder: for measuring what no real model at hand can show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from workers.adapters import CONFIG_FILE, WEIGHTS_FILE
from workers.model import lora
from workers.model.config import ModelConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 512, 8, 4, 64, 1024, 8
EXPERTS = 4
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


def adapter(folder: Path, model: ModelConfig, *, rank: int, seed: int) -> Path:
    """A LoRA adapter in PEFT's layout over every linear of ``model``, large enough to change answers."""
    random = np.random.default_rng(seed)
    modules = [module for group in lora.KINDS.values() for module in group]
    tensors = {}
    for layer in range(model.layers):
        for module in modules:
            out, given = lora.module_shape(model, module)
            name = f"base_model.model.model.layers.{layer}.{module}.lora_{{}}.weight"
            for half, shape in (("A", (rank, given)), ("B", (out, rank))):
                tensors[name.format(half)] = (random.standard_normal(shape) * 0.05).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    names = [module.rpartition(".")[2] for module in modules]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def model(folder: Path, like: Path, vocab: int, *, experts: bool = False) -> Path:
    """A small Llama, or with ``experts`` a Mixtral of four, whose heads, layers and experts go by two.

    ``like``: a model's folder, whose tokenizer it gets.
    """
    random = np.random.default_rng(11)

    def weight(*shape: int) -> Any:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    layers = LAYERS // 2 if experts else LAYERS
    tensors = {"model.embed_tokens.weight": weight(vocab, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(layers):
        made = {
            "self_attn.q_proj": weight(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": weight(HIDDEN, HEADS * HEAD_DIM),
            "input_layernorm": np.ones(HIDDEN, np.float32),
            "post_attention_layernorm": np.ones(HIDDEN, np.float32),
        }
        if experts:
            made["block_sparse_moe.gate"] = weight(EXPERTS, HIDDEN)
        for where in [f"block_sparse_moe.experts.{one}." for one in range(EXPERTS)] if experts else ["mlp."]:
            gate, up, down = ("w1", "w3", "w2") if experts else ("gate_proj", "up_proj", "down_proj")
            made |= {where + gate: weight(INNER, HIDDEN), where + up: weight(INNER, HIDDEN)}
            made[where + down] = weight(HIDDEN, INNER)
        tensors |= {f"model.layers.{layer}.{name}.weight": value for name, value in made.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "dtype": "float32",
        **({"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None} if experts else {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in _TOKENIZER:
        if (like / name).exists():
            os.symlink(like / name, folder / name)
    return folder


def first_layers(folder: Path, like: Path, layers: int) -> Path:
    """The model in ``like`` with its first ``layers`` only: smaller, of the same vocabulary, and seldom right."""
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save

    kept = {}
    for path in sorted(like.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            _, found, rest = name.partition(".layers.")
            if not found or int(rest.partition(".")[0]) < layers:
                kept[name] = tensor
    folder.mkdir(parents=True)
    save(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((like / "config.json").read_text())
    inner = config.get("text_config", config)
    inner["num_hidden_layers"] = layers
    if "layer_types" in inner:
        inner["layer_types"] = inner["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    for name in (*_TOKENIZER, "generation_config.json"):
        if (like / name).exists():
            os.symlink(like / name, folder / name)
    return folder


def without_windows(folder: Path, like: Path) -> Path:
    """The same weights under a configuration whose window no context exceeds, so that every layer keeps everything."""
    config = json.loads((like / "config.json").read_text())
    inner = config.get("text_config", config)
    inner["sliding_window"] = inner.get("max_position_embeddings", 2**20)
    folder.mkdir(parents=True)
    for path in like.iterdir():
        if path.name != "config.json":
            os.symlink(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
