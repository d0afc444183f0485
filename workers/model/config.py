"""``config.json`` of a decoder → ``ModelConfig``. What would change the numbers and is not built is an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.model_store import ModelStoreError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. ``kind`` ``default``, ``linear`` (positions ÷ factor) or ``llama3`` (see rope.py)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts in place of a layer's MLP (``moe.py``)."""

    experts: int
    per_token: int
    """Experts that each token is sent to."""
    intermediate: int
    """Of one expert."""
    normalise: bool
    """The chosen experts' weights are made to sum to 1."""
    shared: int = 0
    """Intermediate size of an expert that every token also goes to, 0 = none."""
    dense: frozenset[int] = frozenset()
    """Layers with a plain MLP instead."""
    held: range | None = None
    """The experts that are here, where the others are on other devices; None = all."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a Llama-family decoder needs to know of itself."""

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    rope: RopeConfig
    tied: bool
    dtype: str = "float32"
    """The stored weights' type, as the config names it."""
    eos_ids: frozenset[int] = frozenset()
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the projection behind attention."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before the rotation (Qwen3)."""
    window: int | None = None
    """Some layer attends to so many latest tokens only. Contexts up to it are computed in full attention."""
    moe: MoeConfig | None = None


Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture decides for itself, whatever its ``config.json`` names. None: as ``attention_bias`` says."""

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    """None: as ``mlp_bias`` says."""
    qk_norm: bool = False
    windowed: Callable[[Fields], bool] = lambda fields: True
    """Whether ``sliding_window`` holds for any layer."""
    moe: Callable[[Fields, str], MoeConfig] | None = None
    """(fields, the file's name for errors) → its mixture of experts."""


def _qwen_windowed(fields: Fields) -> bool:
    """Qwen names a window that is off unless ``use_sliding_window``, and then on from ``max_window_layers``."""
    if not fields.get("use_sliding_window", False):
        return False
    if kinds := fields.get("layer_types"):
        return "sliding_attention" in kinds
    return int(fields.get("max_window_layers", 0)) < int(fields["num_hidden_layers"])


def _qwen_moe_windowed(fields: Fields) -> bool:
    """Which layers it holds for differs between the two; either way some."""
    return bool(fields.get("use_sliding_window", False))


def _mixtral_experts(fields: Fields, where: str) -> MoeConfig:
    """Softmax over all experts, the best few scaled to sum to 1: Mixtral's softmax over the best few."""
    return MoeConfig(
        *_routed(fields, "num_local_experts", where), _positive(fields, "intermediate_size", where), normalise=True
    )


def _qwen_experts(fields: Fields, where: str) -> MoeConfig:
    """Every ``decoder_sparse_step``-th layer has experts, unless ``mlp_only_layers`` names it."""
    step, layers = _positive(fields, "decoder_sparse_step", where, 1), _positive(fields, "num_hidden_layers", where)
    named = _ids(fields.get("mlp_only_layers"))
    return MoeConfig(
        *_routed(fields, "num_experts", where),
        _positive(fields, "moe_intermediate_size", where),
        normalise=_flag(fields, "norm_topk_prob", where),
        dense=frozenset(layer for layer in range(layers) if layer in named or (layer + 1) % step),
    )


def _qwen2_experts(fields: Fields, where: str) -> MoeConfig:
    """As Qwen3's, and one that every token goes to."""
    return replace(_qwen_experts(fields, where), shared=_positive(fields, "shared_expert_intermediate_size", where))


def _routed(fields: Fields, name: str, where: str) -> tuple[int, int]:
    """Experts in all, and how many a token is sent to. Newer transformers writes ``num_local_experts`` for all."""
    name = name if fields.get(name) is not None else "num_local_experts"
    experts, chosen = _positive(fields, name, where), _positive(fields, "num_experts_per_tok", where)
    if chosen > experts:
        raise ModelStoreError(f"{where}: num_experts_per_tok={chosen} exceeds {name}={experts}")
    return experts, chosen


FAMILIES: Mapping[str, Family] = {
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, mlp_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True, output_bias=False, mlp_bias=False, windowed=_qwen_windowed),
    "Qwen3ForCausalLM": Family(mlp_bias=False, qk_norm=True, windowed=_qwen_windowed),
    "MixtralForCausalLM": Family(qkv_bias=False, output_bias=False, mlp_bias=False, moe=_mixtral_experts),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True, output_bias=False, mlp_bias=False, windowed=_qwen_moe_windowed, moe=_qwen2_experts
    ),
    "Qwen3MoeForCausalLM": Family(mlp_bias=False, qk_norm=True, windowed=_qwen_moe_windowed, moe=_qwen_experts),
}
"""Others, also a plugin's, are read as Llama."""


RECURRENT_FIELDS = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "ssm_state_size",
    "linear_conv_kernel_dim",
    "rwkv_version",
)


def read_config(directory: Path) -> ModelConfig:
    """Read ``config.json`` and, if there, ``generation_config.json``. Raises ModelStoreError naming file and field."""
    path = directory / "config.json"
    generation = directory / "generation_config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        extra = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelStoreError(f"{directory}: cannot read the model's config: {error}") from error
    return parse_config(fields, extra, str(path))


def parse_config(fields: Fields, generation: Fields, where: str) -> ModelConfig:
    """Check and translate. ``where`` names the file in errors. Raises ModelStoreError."""
    architecture = str((fields.get("architectures") or ["(none named)"])[0])
    family = FAMILIES.get(architecture, Family())
    if state := _other_state(fields):
        raise ModelStoreError(
            f"{where}: {architecture} keeps state other than keys and values ({state}), which neither cache blocks nor "
            "preemption by recompute know; use a model with attention in every layer"
        )
    for field, allowed in (("hidden_act", ("silu", None)), ("quantization_config", (None,))):
        if fields.get(field) not in allowed:
            raise ModelStoreError(
                f"{where}: {field}={fields[field]!r} is not supported (supported: {allowed[0]!r}); use another model"
            )
    heads = _positive(fields, "num_attention_heads", where)
    hidden = _positive(fields, "hidden_size", where)
    kv_heads = _positive(fields, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise ModelStoreError(
            f"{where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = _positive(fields, "head_dim", where, hidden // heads)
    if head_dim % 2:
        raise ModelStoreError(f"{where}: head_dim={head_dim} is odd; rotary embeddings need an even one")
    attention_bias, mlp_bias = (_flag(fields, name, where) for name in ("attention_bias", "mlp_bias"))
    windowed = fields.get("sliding_window") is not None and family.windowed(fields)
    return ModelConfig(
        architecture=architecture,
        vocab=_positive(fields, "vocab_size", where),
        hidden=hidden,
        intermediate=_positive(fields, "intermediate_size", where),
        layers=_positive(fields, "num_hidden_layers", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=_positive(fields, "max_position_embeddings", where),
        rms_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(fields, where),
        tied=bool(fields.get("tie_word_embeddings", False)),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(fields.get("eos_token_id")),
        qkv_bias=_qkv_bias(fields, where, attention_bias if family.qkv_bias is None else family.qkv_bias),
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        window=_positive(fields, "sliding_window", where) if windowed else None,
        moe=family.moe(fields, where) if family.moe is not None else None,
    )


def _other_state(fields: Fields) -> str | None:
    """The field that says that a layer is recurrent (Mamba, RWKV, linear attention and the like), or None."""
    for name in RECURRENT_FIELDS:
        if fields.get(name):
            return name
    kinds = fields.get("layer_types") or fields.get("layers_block_type") or ()
    strange = sorted({str(kind) for kind in kinds if kind not in ("full_attention", "sliding_attention", "attention")})
    return f"layers of type {', '.join(strange)}" if strange else None


def _rope(fields: Fields, where: str) -> RopeConfig:
    """Old files have ``rope_theta`` and ``rope_scaling``, newer ones ``rope_parameters``."""
    scaling: dict[str, Any] = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ("default", "linear", "llama3"):
        raise ModelStoreError(f"{where}: rope_type={kind!r} is not supported (supported: default, linear, llama3)")
    if float(fields.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ModelStoreError(f"{where}: partial_rotary_factor other than 1.0 is not supported")
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or fields.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_context=int(scaling.get("original_max_position_embeddings", 8192)),
    )


def _positive(fields: Fields, name: str, where: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelStoreError(f"{where}: {name}={value!r} must be a positive whole number")
    return value


def _qkv_bias(fields: Fields, where: str, default: bool) -> bool:
    """Qwen2-MoE names it."""
    return default if fields.get("qkv_bias") is None else _flag(fields, "qkv_bias", where)


def _flag(fields: Fields, name: str, where: str) -> bool:
    value = fields.get(name)
    if value not in (True, False, None):
        raise ModelStoreError(f"{where}: {name}={value!r} must be true or false")
    return bool(value)


def _ids(value: Any) -> frozenset[int]:
    """One id, a list of ids or nothing."""
    if value is None:
        return frozenset()
    return frozenset(int(item) for item in (value if isinstance(value, list) else [value]))
