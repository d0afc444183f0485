"""Plain attention in fp32, one sequence after the other: slow, and what every other backend is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.attention.base import AttentionShape
from workers.model.batch import Batch
from workers.model.kv_cache import KvCache


class ReferenceAttention:
    """softmax(Q·Kᵀ / √d + causal mask)·V (Vaswani et al. 2017, arXiv:1706.03762 §3.2.1)."""

    name = "reference"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def prepare(self, batch: Batch) -> list[tuple[int, int, Tensor, Tensor]]:
        """Per sequence: first row, rows, slots of its context [context], mask [rows, context] (True = may see)."""
        steps = []
        for index, (start, rows, context) in enumerate(
            zip(batch.starts, batch.query_lens, batch.context_lens, strict=True)
        ):
            slots = torch.from_numpy(batch.token_slots(index, context)).to(batch.slots.device)
            position = torch.arange(context - rows, context, device=slots.device)
            steps.append((start, rows, slots, torch.arange(context, device=slots.device) <= position[:, None]))
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
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v).reshape(rows, -1))
        return torch.cat(outputs).to(queries.dtype)
