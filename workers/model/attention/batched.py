"""Attention with one call per group: single-row sequences of similar context together, longer chunks one by one.

Only attention's inputs are gathered into rectangles; nothing else of the model ever sees padding. A rectangle's unused
places point at the sequence's own first token and are masked, so that no other tenant's numbers are ever read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.model.attention.base import AttentionShape
from workers.model.batch import Batch
from workers.model.kv_cache import KvCache


@dataclass(slots=True)
class _Decodes:
    """Sequences with one row each: rows [n], slots [n * width], mask [n, 1, 1, width] or None when all are full."""

    rows: Tensor | slice
    slots: Tensor
    count: int
    mask: Tensor | None


@dataclass(slots=True)
class _Prompt:
    """One sequence with several rows; ``slots`` None: all that it sees is in this step."""

    rows: slice
    slots: Tensor | None
    mask: Tensor | None
    """[rows, tokens]; None = plain lower triangle."""


@dataclass(slots=True)
class _Step:
    decodes: list[_Decodes]
    prompts: list[_Prompt]


class BatchedAttention:
    """Gather and scaled_dot_product_attention, for any device and dtype."""

    name = "batched"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def prepare(self, batch: Batch, window: int = 0) -> _Step:
        """Group single rows by what they see, doubling: a rectangle wastes less than half of its width."""
        most = window or sys.maxsize
        groups: dict[int, list[int]] = {}
        prompts: list[_Prompt] = []
        for index, rows in enumerate(batch.query_lens):
            if rows == 1:
                seen = min(batch.context_lens[index], most)
                groups.setdefault(max(seen - 1, 63).bit_length(), []).append(index)
            else:
                prompts.append(_prompt(batch, index, window))
        return _Step([_decodes(batch, groups[size], most) for size in sorted(groups)], prompts)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: KvCache, step: _Step) -> Tensor:
        """As ``AttentionBackend.attend``."""
        shape = self._shape
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in step.decodes:
            # The query heads of one key head become its rows: no key is copied per query head.
            q = queries[group.rows].reshape(group.count, shape.kv_heads, shape.group, shape.head_dim)
            k, v = (
                part.view(group.count, -1, shape.kv_heads, shape.head_dim).transpose(1, 2)
                for part in cache.gather(layer, group.slots)
            )
            found = self._attention(q, k, v, group.mask, False)
            output[group.rows] = found.reshape(group.count, shape.heads, shape.head_dim)
        for prompt in step.prompts:
            if prompt.slots is None:
                k, v = cache.kept(keys[prompt.rows], values[prompt.rows])
            else:
                k, v = cache.gather(layer, prompt.slots)
            q, k, v = (part.transpose(0, 1)[None] for part in (queries[prompt.rows], k, v))
            found = self._attention(q, k, v, prompt.mask, prompt.mask is None)
            output[prompt.rows] = found[0].transpose(0, 1)
        return output.view(len(queries), -1)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """q [n, heads, rows, dim] over k and v [n, key heads, tokens, dim]; mask True = may see."""
        shape = self._shape
        grouped = q.shape[1] != k.shape[1]
        if not shape.score_cap:
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=shape.scale, enable_gqa=grouped
            )
        if grouped:
            k, v = (part.repeat_interleave(shape.group, dim=1) for part in (k, v))
        scores = torch.tanh(q.float() @ k.float().mT * (shape.scale / shape.score_cap)) * shape.score_cap
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1).to(v.dtype) @ v


def _decodes(batch: Batch, members: list[int], most: int) -> _Decodes:
    contexts = np.array([min(batch.context_lens[index], most) for index in members])
    width = int(contexts.max())
    slots = np.empty((len(members), width), dtype=np.int64)
    for line, index in enumerate(members):
        end = batch.context_lens[index]
        own = batch.token_slots(index, end, end - int(contexts[line]))
        slots[line, : len(own)] = own
        slots[line, len(own) :] = own[0]
    device = batch.slots.device
    mask = None
    if int(contexts.min()) < width:
        mask = torch.from_numpy(np.arange(width) < contexts[:, None])[:, None, None, :].to(device)
    rows: Tensor | slice = torch.tensor([batch.starts[index] for index in members], device=device)
    if batch.starts[members[-1]] - batch.starts[members[0]] == len(members) - 1:
        rows = slice(batch.starts[members[0]], batch.starts[members[-1]] + 1)
    return _Decodes(rows, torch.from_numpy(slots.reshape(-1)).to(device), len(members), mask)


def _prompt(batch: Batch, index: int, window: int) -> _Prompt:
    start, count, context = batch.starts[index], batch.query_lens[index], batch.context_lens[index]
    rows = slice(start, start + count)
    if context == count and (not window or context <= window):
        return _Prompt(rows, None, None)
    device = batch.slots.device
    first = max(0, context - count - window + 1) if window else 0
    position = torch.arange(context - count, context, device=device)
    seen = torch.arange(first, context, device=device)
    mask = seen <= position[:, None]
    if window:
        mask &= seen > position[:, None] - window
    slots = None if context == count else torch.from_numpy(batch.token_slots(index, context, first)).to(device)
    return _Prompt(rows, slots, mask)
