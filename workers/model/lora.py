"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) from PEFT's files: read, checked, scaled. Never from pickle.

A module's output gets ``scale · B (A x)`` added, scale = alpha ÷ rank (÷ √rank for rsLoRA, Kalajdzievski 2023,
arXiv:2312.03732). The scale is multiplied into B here, once, in fp32.

Rules
- What would change the numbers and is not built is an error, by field and value: also a field that is newer than this.
- A file that holds less or more than its config says is an error: half an adapter answers plausibly, and wrongly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from torch import Tensor

from workers.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterError, folder_of
from workers.model.config import ModelConfig

KINDS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The decoder's linears and the modules that each is made of, in the order of their columns."""

_READ = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"),
        *("bias", "init_lora_weights", "layers_to_transform"),
    )
)
_HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout"),
        *("layers_pattern", "exclude_modules", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("megatron_config", "megatron_core", "peft_version", "ensure_weight_tying", "qalora_group_size"),
    )
)
"""Of training, or of how targets were named; the tensors' own names say what is adapted."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starts that also change the base weights: the adapter alone is then not the difference."""
MOST = 1e100
"""Beyond every rank and alpha, and within what a float holds."""
_NAME = re.compile(r"^base_model\.model\.model\.layers\.(\d+)\.(.+)\.lora_([AB])(?:\.[\w-]+)?\.weight$")


@dataclass(frozen=True, slots=True)
class Pair:
    """One module's update, fp32."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank], scaled."""


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapter as read."""

    name: str
    digest: str
    rank: int
    pairs: Mapping[tuple[int, str], Pair]
    """By layer and module (``self_attn.q_proj``)."""


def read(name: str, source: str, model: ModelConfig, *, base_dir: str | Path, max_rank: int, room: int) -> Lora:
    """Read an adapter for ``model``. ``max_rank``, ``room`` (bytes): what the engine takes at most.

    Raises AdapterError naming file, field and value.
    """
    folder = folder_of(source, base_dir)
    size = (folder / WEIGHTS_FILE).stat().st_size
    if size > 4 * room:  # fp32 on disk, 16 bits here, and ranks that other modules round up
        raise AdapterError(f"{folder / WEIGHTS_FILE} has {size:,} bytes; engine.adapter_memory={room:,} holds no such")
    try:
        config_text, data = (folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes()
        fields = json.loads(config_text)
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{folder}: cannot read the adapter: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{folder / CONFIG_FILE} holds no JSON object")
    where = str(folder / CONFIG_FILE)
    _check(fields, where)
    try:
        stored = parse(data)
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:  # KeyError: a type that torch has not
        raise AdapterError(f"{folder / WEIGHTS_FILE} is not a readable safetensors file: {error}") from error
    pairs = dict(_pairs(fields, stored, model, max_rank, folder))
    _complete(fields, pairs, model, folder)
    digest = sha256(len(config_text).to_bytes(8, "little") + config_text + data).hexdigest()
    return Lora(name, f"sha256:{digest}", max(len(pair.a) for pair in pairs.values()), pairs)


def module_shape(model: ModelConfig, module: str) -> tuple[int, int]:
    """(out, in) of a module of every layer. Raises KeyError for one that the decoder has not."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "self_attn.q_proj": (query, model.hidden),
        "self_attn.k_proj": (key, model.hidden),
        "self_attn.v_proj": (key, model.hidden),
        "self_attn.o_proj": (model.hidden, query),
        "mlp.gate_proj": (model.intermediate, model.hidden),
        "mlp.up_proj": (model.intermediate, model.hidden),
        "mlp.down_proj": (model.hidden, model.intermediate),
    }[module]


def _check(fields: Mapping[str, Any], where: str) -> None:
    """Refuse what is not plain LoRA."""
    if fields.get("peft_type") != "LORA":
        raise AdapterError(f"{where}: peft_type={fields.get('peft_type')!r} is not supported; LORA is")
    if fields.get("bias", "none") != "none":
        raise AdapterError(f"{where}: bias={fields['bias']!r} is not supported: train with bias='none'")
    if fields.get("modules_to_save"):
        raise AdapterError(
            f"{where}: modules_to_save={fields['modules_to_save']!r} is not supported: only low-rank updates are "
            "applied; merge the adapter into a model of its own"
        )
    if fields.get("use_dora"):
        raise AdapterError(f"{where}: use_dora=true is not supported: merge the adapter into a model of its own")
    start = fields.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise AdapterError(
            f"{where}: init_lora_weights={start!r} changes the base weights too: save the adapter converted to plain "
            "LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    for name, kind in (("rank_pattern", dict), ("alpha_pattern", dict), ("layers_to_transform", int | list)):
        value = fields.get(name)
        of_layers = not isinstance(value, list) or all(isinstance(layer, int) for layer in value)
        if value is not None and not (isinstance(value, kind) and of_layers):
            raise AdapterError(f"{where}: {name}={value!r} is not of the form that PEFT writes")
    for name, value in fields.items():
        if value and name not in _READ | _HARMLESS and name not in ("modules_to_save", "use_dora"):
            raise AdapterError(f"{where}: {name}={value!r} is not supported")


def _pairs(
    fields: Mapping[str, Any], stored: Mapping[str, Tensor], model: ModelConfig, max_rank: int, folder: Path
) -> Iterator[tuple[tuple[int, str], Pair]]:
    file = folder / WEIGHTS_FILE
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        match = _NAME.match(name)
        if match is None or not any(match[2] in modules for modules in KINDS.values()):
            raise AdapterError(
                f"{file}: {name!r} has no place; adapted can be {', '.join(sorted(_leaves()))} of the decoder's layers"
            )
        layer = int(match[1])
        if layer >= model.layers:
            raise AdapterError(f"{file}: {name!r} is of layer {layer}; this model has {model.layers} layers")
        found = halves.setdefault((layer, match[2]), {})
        if match[3] in found:
            raise AdapterError(f"{file}: {name!r} is there twice, under two names; keep one adapter in a file")
        found[match[3]] = tensor
    if not halves:
        raise AdapterError(f"{file} holds no tensors")
    for (layer, module), found in sorted(halves.items()):
        here = f"{file}: layers.{layer}.{module}"
        if set(found) != {"A", "B"}:
            raise AdapterError(f"{here} has lora_{next(iter(found))} only; both halves are needed")
        yield (layer, module), _pair(fields, found["A"], found["B"], model, module, layer, max_rank, here)


def _pair(
    fields: Mapping[str, Any],
    a: Tensor,
    b: Tensor,
    model: ModelConfig,
    module: str,
    layer: int,
    max_rank: int,
    here: str,
) -> Pair:
    rank = _figure(fields, "r", "rank_pattern", layer, module, here)
    alpha = _figure(fields, "lora_alpha", "alpha_pattern", layer, module, here)
    out, inner = module_shape(model, module)
    pair = []
    for half, tensor, shape in (("A", a, (rank, inner)), ("B", b, (out, rank))):
        if not tensor.is_floating_point():
            raise AdapterError(f"{here}.lora_{half} has type {tensor.dtype}; floating point is needed")
        if tuple(tensor.shape) != shape:
            raise AdapterError(
                f"{here}.lora_{half} has shape {list(tensor.shape)}; for r={rank} and this model it must be "
                f"{list(shape)}: is the adapter of another model?"
            )
        pair.append(tensor.to(torch.float32, copy=True))
        if not bool(torch.isfinite(pair[-1]).all()):
            raise AdapterError(f"{here}.lora_{half} holds numbers that are not finite")
    if rank > max_rank:
        raise AdapterError(f"{here} has rank {rank}; engine.max_adapter_rank={max_rank}: raise it")
    scaled = pair[1] * (alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank))
    if not bool(torch.isfinite(scaled).all()):
        raise AdapterError(f"{here}: lora_alpha={alpha!r} makes numbers of lora_B that are not finite; lower it")
    return Pair(pair[0], scaled)


def _figure(fields: Mapping[str, Any], name: str, pattern: str, layer: int, module: str, here: str) -> int:
    """``r`` or ``lora_alpha`` of a module: the first pattern that the end of its name matches, else the adapter's."""
    value = fields.get(name, 8)
    for key, own in (fields.get(pattern) or {}).items():
        try:
            if re.match(rf"(.*\.)?({key})$", f"model.layers.{layer}.{module}"):
                value = own
                break
        except re.error as error:
            raise AdapterError(f"{here}: {pattern}: {key!r} is no regular expression: {error}") from error
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MOST
    if not number or (name == "r" and value % 1):
        raise AdapterError(f"{here}: {name}={value!r} must be a positive {'whole ' if name == 'r' else ''}number")
    return int(value) if name == "r" else value


def _complete(
    fields: Mapping[str, Any], pairs: Mapping[tuple[int, str], Pair], model: ModelConfig, folder: Path
) -> None:
    """Every module that the config lists by its plain name must be there, in every layer it speaks of."""
    targets, layers = fields.get("target_modules"), fields.get("layers_to_transform")
    if not isinstance(targets, list) or fields.get("exclude_modules"):
        return
    wanted = range(model.layers) if layers is None else [layers] if isinstance(layers, int) else layers
    known = _leaves()
    for target in targets:
        module = known.get(str(target).rpartition(".")[2])
        if module is None:
            raise AdapterError(
                f"{folder / CONFIG_FILE}: target_modules names {target!r}; adapted can be {', '.join(sorted(known))}"
            )
        if target not in (module, module.rpartition(".")[2]):  # of some layer only: its tensor speaks for itself
            continue
        for layer in wanted:
            if (layer, module) not in pairs:
                raise AdapterError(
                    f"{folder / WEIGHTS_FILE} lacks layers.{layer}.{module}, which target_modules names: is it whole?"
                )


def _leaves() -> dict[str, str]:
    """``q_proj`` → ``self_attn.q_proj``."""
    return {module.rpartition(".")[2]: module for modules in KINDS.values() for module in modules}
