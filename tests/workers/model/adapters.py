"""Adapters made and saved by PEFT itself, and the model that each makes when PEFT merges it into the weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from workers.adapters import CONFIG_FILE, WEIGHTS_FILE

SHAPES = {"A": (1, 64), "B": (64, 1)}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(model: Path, folder: Path, *, seed: int = 1, merged: Path | None = None, **settings: Any) -> Path:
    """A random adapter of the model in ``model``, large enough to change its answers; ``merged``: where to write the
    model with it merged in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
        return _write(model, folder, seed, merged, settings)


def _write(model: Path, folder: Path, seed: int, merged: Path | None, settings: dict[str, Any]) -> Path:
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(ALL), **settings})
    adapted = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    adapted.save_pretrained(folder)
    if merged is not None:
        adapted.merge_and_unload().save_pretrained(merged)
        for file in ("tokenizer.json", "generation_config.json"):
            if (model / file).exists():
                (merged / file).unlink(missing_ok=True)
                (merged / file).write_bytes((model / file).read_bytes())
    return folder


def smallest(folder: Path) -> Path:
    """Rank 1 on one module of a model with 64 hidden numbers, 4 heads of 16 and 2 layers."""
    folder.mkdir(parents=True, exist_ok=True)
    base = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {base.format(layer, half): torch.full(shape, 0.1) for layer in (0, 1) for half, shape in SHAPES.items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder
