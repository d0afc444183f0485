"""Plain attention in fp32, one sequence after the other: slow, and what every other backend is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.attention.base import AttentionShape
from workers.model.batch import Batch
from workers.model.kv_cache import KvCache


class ReferenceAttention:
    """softmax(Q·Kᵀ / √d + causal mask)·V (Vaswani et al. 2017, arXiv:1706.03762 §3.2.1), with windows and soft caps."""

    name = "reference"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def prepare(self, batch: Batch, window: int = 0) -> list[tuple[int, int, Tensor, Tensor]]:
        """Per sequence: first row, rows, slots of what they see [seen], mask [rows, seen] (True = may see)."""
        steps = []
        for index, (start, rows, context) in enumerate(
            zip(batch.starts, batch.query_lens, batch.context_lens, strict=True)
        ):
            first = max(0, context - rows - window + 1) if window else 0
            slots = torch.from_numpy(batch.token_slots(index, context, first)).to(batch.slots.device)
            position = torch.arange(context - rows, context, device=slots.device)
            seen = torch.arange(first, context, device=slots.device)
            mask = seen <= position[:, None]
            if window:
                mask &= seen > position[:, None] - window
            steps.append((start, rows, slots, mask))
        return steps

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cache: KvCache,
        step: list[tuple[int, int, Tensor, Tensor]],
    ) -> Tensor:
        """As ``AttentionBackend.attend``."""
        shape, outputs = self._shape, []
        for start, rows, slots, visible in step:
            q = queries[start : start + rows].float()
            k, v = (part.float().repeat_interleave(shape.group, dim=1) for part in cache.gather(layer, slots))
            scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scale
            if shape.score_cap:
                scores = torch.tanh(scores / shape.score_cap) * shape.score_cap
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v).reshape(rows, -1))
        return torch.cat(outputs).to(queries.dtype)
