"""Decoders whose MLPs are mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE (Shazeer et al. 2017, arXiv:1701.06538;
Jiang et al. 2024, arXiv:2401.04088 §2.1).

A router's softmax over all experts picks the best few of each token; their outputs are added with its weights. Rows are
grouped by expert, so that an expert's linears run once per layer over the rows that chose it, and not at all where none
did. What a row gets depends on itself only, and its experts are always added in the same order: batch and chunks
change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.model.config import ModelConfig, MoeConfig
from workers.model.llama import GatedMlp, LlamaDecoder, LlamaLayer, linear
from workers.model.weights import LayerWeights

MIXTRAL = ("w1", "w3", "w2")
QWEN = ("gate_proj", "up_proj", "down_proj")


class Experts(nn.Module):
    """Router, experts, and the expert that all tokens share where there is one.

    Where experts are on other devices (``MoeConfig.held``) the output is what those here add to the sum.
    """

    def __init__(self, config: ModelConfig, moe: MoeConfig, take: LayerWeights) -> None:
        super().__init__()
        hidden, mixtral = config.hidden, config.architecture == "MixtralForCausalLM"
        prefix, names = ("block_sparse_moe", MIXTRAL) if mixtral else ("mlp", QWEN)
        self._moe = moe
        self.router = linear(take.weight(f"{prefix}.gate", moe.experts, hidden))
        self._held = range(moe.experts) if moe.held is None else moe.held
        self.experts = nn.ModuleList(
            GatedMlp(take, f"{prefix}.experts.{index}", hidden, moe.intermediate, names=names) for index in self._held
        )
        self.shared = GatedMlp(take, f"{prefix}.shared_expert", hidden, moe.shared) if moe.shared else None
        self.shared_gate = linear(take.weight(f"{prefix}.shared_expert_gate", 1, hidden)) if moe.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, hidden] → [rows, hidden]."""
        weights, chosen = self._route(x)
        output = torch.zeros_like(x)
        rows = torch.arange(len(x), device=x.device).repeat_interleave(self._moe.per_token)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self._moe.experts).tolist()
        groups = torch.split(order, counts)
        for expert, index in zip(self.experts, self._held, strict=True):
            places = groups[index]
            if len(places):
                own = rows[places]
                output.index_add_(0, own, expert(x[own]) * weights.flatten()[places, None])
        if self.shared is not None and self.shared_gate is not None:
            output += torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return output

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row the best experts' weights, in x's type, and their numbers, each [rows, per_token]."""
        odds = self.router(x).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = odds.topk(self._moe.per_token, dim=-1)
        if self._moe.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


class MoeLayer(LlamaLayer):
    """A Llama's layer with experts, but where the config says that it has a plain MLP."""

    def _mlp(self, config: ModelConfig, index: int, take: LayerWeights) -> nn.Module:
        moe = config.moe
        if moe is None or index in moe.dense:
            return super()._mlp(config, index, take)
        return Experts(config, moe, take)


class MoeDecoder(LlamaDecoder):
    """The decoder of ``llama.py`` with ``MoeLayer``."""

    layer = MoeLayer
    takes_adapters = False
