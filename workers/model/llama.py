"""Llama-family decoder on a flat token axis: RMSNorm, RoPE, grouped-query attention, SwiGLU (Touvron et al. 2023,
arXiv:2302.13971 §2.2; grouped queries: Ainslie et al. 2023, arXiv:2305.13245).

Rows of all sequences lie one after the other, so every linear runs once per layer over exactly the planned tokens.
Weights are fused where two linears read the same input: q, k and v; gate and up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu

from workers.model import rope
from workers.model.config import ModelConfig
from workers.model.weights import Weights

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values [rows, heads, head_dim]) → [rows, heads * head_dim]."""


def _linear(weight: Tensor) -> nn.Linear:
    """A bias-free linear around ``weight`` [out, in]; a module, so that hooks can count what runs through it."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


class LlamaLayer(nn.Module):
    """One block: attention, then the gated MLP, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        super().__init__()
        self._config, self._index = config, index
        prefix, hidden, head_dim = f"model.layers.{index}.", config.hidden, config.head_dim
        query, key = config.heads * head_dim, config.kv_heads * head_dim

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(f"{prefix}{name}.weight", shape)

        self.input_norm = take("input_layernorm", hidden)
        self.post_norm = take("post_attention_layernorm", hidden)
        self.qkv = _linear(
            torch.cat(
                [
                    take("self_attn.q_proj", query, hidden),
                    take("self_attn.k_proj", key, hidden),
                    take("self_attn.v_proj", key, hidden),
                ]
            )
        )
        self.output = _linear(take("self_attn.o_proj", hidden, query))
        self.gate_up = _linear(
            torch.cat(
                [take("mlp.gate_proj", config.intermediate, hidden), take("mlp.up_proj", config.intermediate, hidden)]
            )
        )
        self.down = _linear(take("mlp.down_proj", hidden, config.intermediate))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention) -> Tensor:
        """x [rows, hidden] → [rows, hidden]; cos and sin [rows, 1, head_dim / 2]."""
        config = self._config
        qkv = self.qkv(rms_norm(x, (config.hidden,), self.input_norm, config.rms_eps))
        parts = qkv.view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        turned = rope.rotate(parts[:, : config.heads + config.kv_heads], cos, sin)
        queries, keys = turned[:, : config.heads], turned[:, config.heads :]
        x = x + self.output(attend(self._index, queries, keys, parts[:, config.heads + config.kv_heads :]))
        gate, up = self.gate_up(rms_norm(x, (config.hidden,), self.post_norm, config.rms_eps)).chunk(2, dim=-1)
        result: Tensor = x + self.down(silu(gate) * up)
        return result


class LlamaDecoder(nn.Module):
    """The whole decoder. Raises ModelStoreError when a weight is missing or has another shape."""

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = weights.take("model.embed_tokens.weight", (config.vocab, config.hidden))
        self.layers = nn.ModuleList(LlamaLayer(config, index, weights) for index in range(config.layers))
        self.norm = weights.take("model.norm.weight", (config.hidden,))
        head = self.embedding if config.tied else weights.take("lm_head.weight", (config.vocab, config.hidden))
        self.head = _linear(head)
        cos, sin = rope.table(config.rope, config.head_dim, max_context)
        self._cos, self._sin = (part.to(head.device, head.dtype)[:, None] for part in (cos, sin))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attention, rows: Tensor) -> Tensor:
        """tokens and positions int64 [rows] → fp32 logits [len(rows wanted), vocab] of the rows that sample."""
        x = embedding(tokens, self.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        if not len(rows):
            return x.new_empty(0, self.config.vocab, dtype=torch.float32)
        last = rms_norm(x[rows], (self.config.hidden,), self.norm, self.config.rms_eps)
        logits: Tensor = self.head(last)
        return logits.float()

    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        kept = {id(part): part.nbytes for part in (self.embedding, self.norm, self.head.weight)}
        if self.config.tied:
            kept.pop(id(self.head.weight))
        for layer in self.layers:
            assert isinstance(layer, LlamaLayer)
            for part in (layer.input_norm, layer.post_norm, *layer.parameters()):
                kept[id(part)] = part.nbytes
        return sum(kept.values())
