"""Llama-family decoder on a flat token axis: RMSNorm, RoPE, grouped-query attention, SwiGLU (Touvron et al. 2023,
arXiv:2302.13971 §2.2; grouped queries: Ainslie et al. 2023, arXiv:2305.13245; Gemma 3: arXiv:2503.19786 §2).

Rows of all sequences lie one after the other, so every linear runs once per layer over exactly the planned tokens.
Weights are fused where two linears read the same input: q, k and v; gate and up. Mistral, Qwen and Gemma are the same
but for biases, norms, windows, activation and scales, which ``ModelConfig`` tells.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm, silu

from workers.model import rope
from workers.model.config import ModelConfig
from workers.model.deltas import Deltas
from workers.model.parallel.place import ALONE, Place
from workers.model.quant.linear import QuantisedLinear
from workers.model.quant.matrix import Matrix, Quantised
from workers.model.weights import LayerWeights, Weights, norm_weight

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values [rows, heads, head_dim]) → [rows, heads * head_dim]."""


def linear(weight: Matrix, bias: Tensor | None = None) -> nn.Linear:
    """A linear around ``weight`` [out, in]; a module, so that hooks can count what runs through it."""
    if not isinstance(weight, Tensor):
        return QuantisedLinear(weight, bias)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def adapted(module: nn.Linear, kind: str, x: Tensor, deltas: Deltas | None, layer: int) -> Tensor:
    """A linear of x, and what adapters add to it (``kind``: of ``lora.KINDS``)."""
    y: Tensor = module(x)
    if deltas is not None:
        deltas.add(layer, kind, x, y)
    return y


class GatedMlp(nn.Module):
    """down(act(gate(x)) · up(x)) (Shazeer 2020, arXiv:2002.05202), gate and up as one linear.

    The activation is SiLU, or GELU in its tanh form.
    """

    def __init__(
        self,
        take: LayerWeights,
        prefix: str,
        hidden: int,
        inner: int,
        biased: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        *,
        gelu: bool = False,
    ) -> None:
        """Takes ``<prefix>.<name>`` of gate, up and down."""
        super().__init__()
        self._gelu = gelu
        gate, up, down = (f"{prefix}.{name}" for name in names)
        self.gate_up = linear(*take.fused((gate, up), (inner, inner), hidden, biased))
        self.down = linear(*take.fused((down,), (hidden,), inner, biased))

    def forward(self, x: Tensor, deltas: Deltas | None = None, layer: int = 0) -> Tensor:
        """x [rows, hidden] → [rows, hidden]. ``deltas``: what adapters add, in layer ``layer``."""
        gate, up = adapted(self.gate_up, "gate_up", x, deltas, layer).chunk(2, dim=-1)
        active = gelu(gate, approximate="tanh") if self._gelu else silu(gate)
        return adapted(self.down, "down", active * up, deltas, layer)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis; in fp32 where the weight is (Gemma's), the result in the type of ``x``."""
    if weight.dtype == x.dtype:
        return rms_norm(x, weight.shape, weight, eps)
    return rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class LlamaLayer(nn.Module):
    """One block: attention, then the gated MLP, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, place: Place = ALONE) -> None:
        super().__init__()
        self._config, self._index, self._place = config, index, place
        hidden, head_dim = config.hidden, config.head_dim
        query, key = config.heads * head_dim, config.kv_heads * head_dim
        take = LayerWeights(weights, index)
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        unit = config.unit_norms
        self.input_norm = take.norm("input_layernorm", hidden, unit)
        self.mlp_norm = take.norm(config.mlp_norm_name, hidden, unit)
        self.after_attention = take.norm("post_attention_layernorm", hidden, unit) if config.post_norms else None
        self.after_mlp = take.norm("post_feedforward_layernorm", hidden, unit) if config.post_norms else None
        self.query_norm = take.norm("self_attn.q_norm", head_dim, unit) if config.qk_norm else None
        self.key_norm = take.norm("self_attn.k_norm", head_dim, unit) if config.qk_norm else None
        self.qkv = linear(*take.fused(attention, (query, key, key), hidden, config.qkv_bias))
        self.output = linear(*take.fused(("self_attn.o_proj",), (hidden,), query, config.output_bias))
        self.mlp = self._mlp(config, index, take)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention, deltas: Deltas | None = None) -> Tensor:
        """x [rows, hidden] → [rows, hidden]; cos and sin [rows, 1, head_dim / 2]."""
        config, index = self._config, self._index
        qkv = adapted(self.qkv, "qkv", _normed(x, self.input_norm, config.rms_eps), deltas, index)
        parts = qkv.view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        both = config.heads + config.kv_heads
        turned = parts[:, :both]
        if self.query_norm is not None and self.key_norm is not None:
            queries = _normed(turned[:, : config.heads], self.query_norm, config.rms_eps)
            keys = _normed(turned[:, config.heads :], self.key_norm, config.rms_eps)
            turned = torch.cat((queries, keys), dim=1)
        turned = rope.rotate(turned, cos, sin)
        queries, keys = turned[:, : config.heads], turned[:, config.heads :]
        add = self._place.add
        output = add(adapted(self.output, "output", attend(index, queries, keys, parts[:, both:]), deltas, index))
        x = x + self._after(output, self.after_attention)
        normed = _normed(x, self.mlp_norm, config.rms_eps)
        output = add(self.mlp(normed) if deltas is None else self.mlp(normed, deltas, index))
        return x + self._after(output, self.after_mlp)

    def _after(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else _normed(x, norm, self._config.rms_eps)

    def norms(self) -> tuple[Tensor | None, ...]:
        """Those that the model has, and None for the others."""
        return (
            self.input_norm,
            self.mlp_norm,
            self.after_attention,
            self.after_mlp,
            self.query_norm,
            self.key_norm,
        )

    def _mlp(self, config: ModelConfig, index: int, take: LayerWeights) -> nn.Module:
        """What stands behind attention: [rows, hidden] → [rows, hidden]."""
        return GatedMlp(take, "mlp", config.hidden, config.intermediate, config.mlp_bias, gelu=config.gelu)


class LlamaDecoder(nn.Module):
    """The whole decoder. Raises ModelStoreError when a weight is missing or has another shape."""

    layer: type[LlamaLayer] = LlamaLayer
    """What it is made of."""
    takes_adapters = True
    splits = True
    """It can be a part of a model (``config`` is the part's) that runs with others': it takes ``place``."""

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int, place: Place = ALONE) -> None:
        super().__init__()
        self.config, self._place = config, place
        vocabulary = (config.vocab, config.hidden)
        embedded = place.first or (place.last and config.tied)
        self.embedding = weights.matrix("model.embed_tokens.weight", vocabulary) if embedded else None
        self.layers = nn.ModuleList(self.layer(config, index, weights, place) for index in range(config.layers))
        norm = weights.take("model.norm.weight", (config.hidden,)) if place.last else None
        self.norm = None if norm is None else norm_weight(norm, config.unit_norms)
        head = self.embedding if config.tied or not place.last else weights.matrix("lm_head.weight", vocabulary)
        self.head = linear(head) if place.last and head is not None else None
        like = self.layers[0].input_norm
        assert isinstance(like, Tensor)
        dtype = weights.dtype
        kinds = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self._ropes = {
            kind: tuple(part.to(like.device, dtype)[:, None] for part in rope.table(kind, config.head_dim, max_context))
            for kind in kinds
        }
        self._rope_of = [config.rope_of(index) for index in range(config.layers)]
        self._like = self._ropes[config.rope][0]

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attention, rows: Tensor, deltas: Deltas | None = None
    ) -> Tensor:
        """tokens and positions int64 [rows] → fp32 logits [len(rows wanted), vocab] of the rows that sample."""
        place = self._place
        x = self._embedded(tokens) if place.first else place.receive((len(tokens), self.config.hidden), self._like)
        turns = {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self._ropes.items()}
        for layer, kind in zip(self.layers, self._rope_of, strict=True):
            x = layer(x, *turns[kind], attend, deltas)
        if not place.last:
            place.send(x)
        if not len(rows):
            return x.new_empty(0, self.config.vocab, dtype=torch.float32)
        logits: Tensor | None = None
        if self.head is not None and self.norm is not None:
            logits = self.head(_normed(x[rows], self.norm, self.config.rms_eps)).float()
            if cap := self.config.logit_cap:
                logits = torch.tanh(logits / cap) * cap
        return place.gather(logits, len(rows))

    def _embedded(self, tokens: Tensor) -> Tensor:
        if isinstance(self.embedding, Quantised):
            x = self.embedding.rows(lambda part: part[tokens]).dense(self._like.dtype)
        else:
            assert self.embedding is not None
            x = self._place.embed(tokens, self.embedding)
        if not self.config.scaled_embedding:
            return x
        return x * torch.tensor(self.config.hidden**0.5, dtype=x.dtype, device=x.device)

    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        parts: list[Tensor | None] = [*self.parameters(), self.norm, *_tensors(self.embedding)]
        for module in self.modules():
            if isinstance(module, LlamaLayer):
                parts += module.norms()
            if isinstance(module, QuantisedLinear):
                parts += _tensors(module.matrix)
        return sum({part.data_ptr(): part.nbytes for part in parts if part is not None}.values())


def _tensors(weight: Matrix | None) -> tuple[Tensor, ...]:
    if weight is None:
        return ()
    return (weight,) if isinstance(weight, Tensor) else weight.tensors()
