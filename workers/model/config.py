"""``config.json`` of a decoder → ``ModelConfig``. What would change the numbers and is not built is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

from workers.model.fields import MOST, Fields, flag, ids, names, natural, number, part, positive, read_object
from workers.model_store import ModelStoreError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. ``kind``: ``default``, ``linear`` (positions ÷ factor), ``llama3`` or ``yarn``
    (``rope.py``)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    turns: tuple[float, float] = (32.0, 1.0)
    """Of ``yarn``: what turns more often than the first in the original context is kept, less often than the second,
    slowed."""
    truncate: bool = True
    """Of ``yarn``: these borders are whole pairs."""
    attention: float = 1.0
    """Queries and keys are both multiplied by it."""


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
    """RMSNorm over each head of q and k, before the rotation (Qwen3, Gemma 3)."""
    windows: tuple[int, ...] = ()
    """How many latest tokens each layer attends to, its own included; 0 = all. Empty: all layers attend to all."""
    moe: MoeConfig | None = None
    local_rope: RopeConfig | None = None
    """Of the layers with a window, where theirs differs (Gemma 3)."""
    gelu: bool = False
    """The MLP's gate goes through GELU (in its tanh form), not SiLU."""
    unit_norms: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    post_norms: bool = False
    """What attention and MLP give is normed before it is added (Gemma 2 and 3)."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden) (Gemma)."""
    query_scale: float | None = None
    """Scores are multiplied by it; None: by 1 / sqrt(head_dim)."""
    score_cap: float = 0.0
    """Scores are bent to ±cap by tanh (Gemma 2); 0 = not."""
    logit_cap: float = 0.0
    """Logits likewise."""

    @property
    def mlp_norm_name(self) -> str:
        """The norm before the MLP; checkpoints with norms behind attention call that one by Llama's name for it."""
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    def window(self, layer: int) -> int:
        """How many latest tokens a layer attends to; 0 = all."""
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> RopeConfig:
        """A layer's rotation."""
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture decides for itself, whatever its ``config.json`` names. None: as ``attention_bias`` says."""

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    """None: as ``mlp_bias`` says."""
    qk_norm: bool = False
    slides: Callable[[Fields, int], bool] = lambda fields, layer: True
    """Whether ``sliding_window`` holds for a layer, where ``layer_types`` does not say so."""
    optional_window: bool = False
    """It holds only with ``use_sliding_window``."""
    gemma: bool = False
    """Norms of 1 + weight, also behind attention and MLP; GELU; scaled embeddings; a scale of its own for scores."""
    moe: Callable[[Fields, str], MoeConfig] | None = None
    """(fields, the file's name for errors) → its mixture of experts."""


def _qwen_slides(fields: Fields, layer: int) -> bool:
    """Qwen's window is on from ``max_window_layers``."""
    return layer >= (fields.get("max_window_layers") or 0)


def _qwen2_moe_slides(fields: Fields, layer: int) -> bool:
    """Every second layer below ``max_window_layers``."""
    below = fields.get("max_window_layers")
    return layer % 2 == 0 and layer < (28 if below is None else below)


def _gemma3_slides(fields: Fields, layer: int) -> bool:
    """Every sixth layer attends to all, unless the file names another pattern."""
    pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 6
    return (layer + 1) % int(pattern) != 0


def _gemma2_slides(fields: Fields, layer: int) -> bool:
    """Every second layer attends to all."""
    return layer % 2 == 0


def _mixtral_experts(fields: Fields, where: str) -> MoeConfig:
    """Softmax over all experts, the best few scaled to sum to 1: Mixtral's softmax over the best few."""
    return MoeConfig(
        *_routed(fields, "num_local_experts", where), positive(fields, "intermediate_size", where), normalise=True
    )


def _qwen_experts(fields: Fields, where: str) -> MoeConfig:
    """Every ``decoder_sparse_step``-th layer has experts, unless ``mlp_only_layers`` names it."""
    step, layers = positive(fields, "decoder_sparse_step", where, 1), positive(fields, "num_hidden_layers", where)
    named = ids(fields, "mlp_only_layers", where)
    return MoeConfig(
        *_routed(fields, "num_experts", where),
        positive(fields, "moe_intermediate_size", where),
        normalise=flag(fields, "norm_topk_prob", where),
        dense=frozenset(layer for layer in range(layers) if layer in named or (layer + 1) % step),
    )


def _qwen2_experts(fields: Fields, where: str) -> MoeConfig:
    """As Qwen3's, and one that every token goes to."""
    return replace(_qwen_experts(fields, where), shared=positive(fields, "shared_expert_intermediate_size", where))


def _routed(fields: Fields, name: str, where: str) -> tuple[int, int]:
    """Experts in all, and how many a token is sent to. Newer transformers writes ``num_local_experts`` for all."""
    name = name if fields.get(name) is not None else "num_local_experts"
    experts, chosen = positive(fields, name, where), positive(fields, "num_experts_per_tok", where)
    if chosen > experts:
        raise ModelStoreError(f"{where}: num_experts_per_tok={chosen} exceeds {name}={experts}")
    return experts, chosen


FAMILIES: Mapping[str, Family] = {
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, mlp_bias=False),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, output_bias=False, mlp_bias=False, slides=_qwen_slides, optional_window=True
    ),
    "Qwen3ForCausalLM": Family(mlp_bias=False, qk_norm=True, slides=_qwen_slides, optional_window=True),
    "MixtralForCausalLM": Family(qkv_bias=False, output_bias=False, mlp_bias=False, moe=_mixtral_experts),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        slides=_qwen2_moe_slides,
        optional_window=True,
        moe=_qwen2_experts,
    ),
    "Qwen3MoeForCausalLM": Family(mlp_bias=False, qk_norm=True, optional_window=True, moe=_qwen_experts),
    "Gemma2ForCausalLM": Family(mlp_bias=False, gemma=True, slides=_gemma2_slides),
    "Gemma3ForCausalLM": Family(mlp_bias=False, gemma=True, qk_norm=True, slides=_gemma3_slides),
}
"""Others, also a plugin's, are read as Llama."""


_KINDS = ("full_attention", "sliding_attention")
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
    path, generation = directory / "config.json", directory / "generation_config.json"
    return parse_config(read_object(path), read_object(generation) if generation.exists() else {}, str(path))


def parse_config(fields: Fields, generation: Fields, where: str) -> ModelConfig:
    """Check and translate. ``where`` names the file in errors. Raises ModelStoreError."""
    architecture = (names(fields, "architectures", where) or ["(none named)"])[0]
    family = FAMILIES.get(architecture, Family())
    if state := _other_state(fields, where):
        raise ModelStoreError(
            f"{where}: {architecture} keeps state other than keys and values ({state}), which neither cache blocks nor "
            "preemption by recompute know; use a model with attention in every layer"
        )
    for field, allowed in (
        (
            "hidden_activation" if family.gemma else "hidden_act",
            (("gelu_pytorch_tanh" if family.gemma else "silu"), None),
        ),
        ("quantization_config", (None,)),
        ("use_bidirectional_attention", (None, False)),
    ):
        if fields.get(field) not in allowed:
            raise ModelStoreError(
                f"{where}: {field}={fields[field]!r} is not supported (supported: {allowed[0]!r}); use another model"
            )
    heads = positive(fields, "num_attention_heads", where)
    hidden = positive(fields, "hidden_size", where)
    kv_heads = positive(fields, "num_key_value_heads", where, heads)
    if heads % kv_heads:
        raise ModelStoreError(
            f"{where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = positive(fields, "head_dim", where, hidden // heads)
    if head_dim % 2:
        raise ModelStoreError(f"{where}: head_dim={head_dim} is odd; rotary embeddings need an even one")
    attention_bias, mlp_bias = (flag(fields, name, where) for name in ("attention_bias", "mlp_bias"))
    layers = positive(fields, "num_hidden_layers", where)
    ropes = _ropes(fields, where, family)
    max_context = positive(fields, "max_position_embeddings", where)
    if ropes[0].kind == "yarn":  # some files name the context before it was scaled
        max_context = max(max_context, int(ropes[0].original_context * ropes[0].factor))
    return ModelConfig(
        architecture=architecture,
        vocab=positive(fields, "vocab_size", where),
        hidden=hidden,
        intermediate=positive(fields, "intermediate_size", where),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        rms_eps=number(fields, "rms_norm_eps", where, 1e-6),
        rope=ropes[0],
        tied=flag(fields, "tie_word_embeddings", where, family.gemma),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        eos_ids=ids(generation, "eos_token_id", where) or ids(fields, "eos_token_id", where),
        qkv_bias=_qkv_bias(fields, where, attention_bias if family.qkv_bias is None else family.qkv_bias),
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        windows=_windows(fields, layers, where, family),
        local_rope=ropes[1],
        gelu=family.gemma,
        unit_norms=family.gemma,
        post_norms=family.gemma,
        scaled_embedding=family.gemma,
        query_scale=number(fields, "query_pre_attn_scalar", where, 256.0) ** -0.5 if family.gemma else None,
        score_cap=number(fields, "attn_logit_softcapping", where) if family.gemma else 0.0,
        logit_cap=number(fields, "final_logit_softcapping", where) if family.gemma else 0.0,
        moe=family.moe(fields, where) if family.moe is not None else None,
    )


def _windows(fields: Fields, layers: int, where: str, family: Family) -> tuple[int, ...]:
    """By layer, 0 = none; empty when no layer has one."""
    if fields.get("sliding_window") is None:
        return ()
    if family.optional_window and not flag(fields, "use_sliding_window", where):
        return ()
    window = positive(fields, "sliding_window", where)
    kinds = names(fields, "layer_types", where)
    if kinds and len(kinds) != layers:
        raise ModelStoreError(f"{where}: layer_types names {len(kinds)} layers, num_hidden_layers={layers}")
    for name in ("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"):
        natural(fields, name, where, 1)
    slides = [kinds[layer] == "sliding_attention" if kinds else family.slides(fields, layer) for layer in range(layers)]
    return tuple(window * one for one in slides) if any(slides) else ()


def _ropes(fields: Fields, where: str, family: Family) -> tuple[RopeConfig, RopeConfig | None]:
    """Of layers that attend to all, and of those with a window where that is another (Gemma 3: never scaled)."""
    named = part(fields, "rope_parameters", where)
    if "full_attention" in named or "sliding_attention" in named:
        both = [_rope({**fields, "rope_scaling": None, "rope_parameters": named.get(kind)}, where) for kind in _KINDS]
        return both[0], both[1]
    if family.gemma and family.qk_norm:
        local = number(fields, "rope_local_base_freq", where, 10000.0)
        return _rope({"rope_theta": 1e6, **fields}, where), RopeConfig(theta=local)
    return _rope(fields, where), None


def _other_state(fields: Fields, where: str) -> str | None:
    """The field that says that a layer is recurrent (Mamba, RWKV, linear attention and the like), or None."""
    for name in RECURRENT_FIELDS:
        if fields.get(name):
            return name
    kinds = names(fields, "layer_types", where) or names(fields, "layers_block_type", where)
    strange = sorted({kind for kind in kinds if kind not in ("full_attention", "sliding_attention", "attention")})
    return f"layers of type {', '.join(strange)}" if strange else None


def _rope(fields: Fields, where: str) -> RopeConfig:
    """Old files have ``rope_theta`` and ``rope_scaling``, newer ones ``rope_parameters``."""
    scaling = {**part(fields, "rope_scaling", where), **part(fields, "rope_parameters", where)}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in (kinds := ("default", "linear", "llama3", "yarn")):
        raise ModelStoreError(f"{where}: rope_type={kind!r} is not supported (supported: {', '.join(kinds)})")
    turned = number(scaling, "partial_rotary_factor", where, 1.0)
    if number(fields, "partial_rotary_factor", where, turned) != 1.0:
        raise ModelStoreError(f"{where}: partial_rotary_factor other than 1.0 is not supported")
    low, high = number(scaling, "low_freq_factor", where, 1.0), number(scaling, "high_freq_factor", where, 4.0)
    if kind == "llama3" and low >= high:
        raise ModelStoreError(f"{where}: low_freq_factor={low:g} must be below high_freq_factor={high:g}")
    theta = number(scaling, "rope_theta", where, number(fields, "rope_theta", where, 10000.0))
    made = RopeConfig(
        theta=theta,
        kind=kind,
        factor=number(scaling, "factor", where, 1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=positive(scaling, "original_max_position_embeddings", where, 8192),
    )
    return _yarn(made, fields, scaling, where) if kind == "yarn" else made


def _yarn(rope: RopeConfig, fields: Fields, scaling: Fields, where: str) -> RopeConfig:
    context = positive(fields, "max_position_embeddings", where)
    original = positive(scaling, "original_max_position_embeddings", where, context)
    factor = number(scaling, "factor", where, context / original)
    often, seldom = number(scaling, "beta_fast", where, 32.0), number(scaling, "beta_slow", where, 1.0)
    if often <= seldom or rope.theta <= 1 or original * factor >= MOST:
        raise ModelStoreError(
            f"{where}: rope_type=yarn with beta_fast={often:g}, beta_slow={seldom:g}, rope_theta={rope.theta:g}, "
            f"factor={factor:g} makes no rotation"
        )

    def grown(part: float) -> float:
        return 0.1 * part * log(factor) + 1.0 if factor > 1 else 1.0

    above, below = number(scaling, "mscale", where), number(scaling, "mscale_all_dim", where)
    attention = number(
        scaling, "attention_factor", where, grown(above) / grown(below) if above and below else grown(1.0)
    )
    return replace(
        rope,
        factor=factor,
        original_context=original,
        turns=(often, seldom),
        truncate=flag(scaling, "truncate", where, True),
        attention=attention,
    )


def _qkv_bias(fields: Fields, where: str, default: bool) -> bool:
    """Qwen2-MoE names it."""
    return default if fields.get("qkv_bias") is None else flag(fields, "qkv_bias", where)
