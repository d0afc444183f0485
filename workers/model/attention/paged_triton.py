"""Attention over block tables in one Triton kernel: decodes and ragged prompt chunks, grouped queries, online softmax.

The method is FlashAttention's (Dao et al. 2022, arXiv:2205.14135 §3.1: running maximum and sum, keys walked through in
blocks) over PagedAttention's block tables (Kwon et al. 2023, arXiv:2309.06180 §4.1).

Rules
- A program computes a tile: some rows of one sequence for all query heads of one key head, so that every key is read
  once per group. It walks from the sequence's first key, so a row's result depends on its own sequence only.
- Nothing is read that the sequence did not write: places beyond the context are masked in the load, not only in the
  softmax, and a foreign NaN cannot pass.
- Compiled once per kind of tile (``TorchRunner.warm_up``); nothing that changes between steps is specialised on.
- On a CPU it runs in Triton's interpreter only (``TRITON_INTERPRET=1`` before the import), which is for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.base import AttentionShape, as_computed_only
from workers.model.batch import Batch
from workers.model.kv_cache import KvCache
from workers.model.staging import ship

KEYS = 32
"""Keys per turn of the walk."""
LEAST_ROWS = 16
"""Rows of a decode's tile: the least that a matrix unit takes."""
PROMPT_ROWS = 64
"""Rows of a prompt's tile; half of it for head sizes beyond 128, whose tiles would not fit the smaller GPUs' memory."""
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""In the interpreter products are computed in fp32: it knows no bfloat16 ones."""


@triton.jit(do_not_specialize=["table_width"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries,
    output,
    keys,
    values,
    tables,
    starts,
    counts,
    contexts,
    tile_sequence,
    tile_row,
    table_width,
    scale,
    query_stride,
    output_stride,
    slot_stride,
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    DIM_PADDED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WALK: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):
    """Grid: (tiles, key heads). Line m of a tile is query head m % GROUP of the tile's token m // GROUP."""
    tile, key_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequence + tile)
    first = tl.load(tile_row + tile)
    start, count, context = tl.load(starts + sequence), tl.load(counts + sequence), tl.load(contexts + sequence)
    line = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    token = first + line // GROUP
    head = key_head * GROUP + line % GROUP
    inside = dim[None, :] < DIM
    live = (token < count) & (line < ROWS // GROUP * GROUP)
    place = (start + token)[:, None] * query_stride + head[:, None] * DIM + dim[None, :]
    query = tl.load(queries + place, mask=live[:, None] & inside, other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    position = context - count + token
    end = tl.minimum(context - count + first + ROWS // GROUP, context)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for begin in range(0, end, WALK):
        key = begin + tl.arange(0, WALK)
        there = key < end
        block = tl.load(tables + sequence * table_width + key // BLOCK, mask=there, other=0)
        slot = (block * BLOCK + key % BLOCK)[:, None] * slot_stride + key_head * DIM + dim[None, :]
        k = tl.load(keys + slot, mask=there[:, None] & inside, other=0.0)
        v = tl.load(values + slot, mask=there[:, None] & inside, other=0.0)
        if WIDE:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        seen = (key[None, :] <= position[:, None]) & there[None, :]
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp(score - new[:, None])
        fade = tl.exp(peak - new)
        total = total * fade + tl.sum(weight, 1)
        mean = mean * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = new
    result = mean / total[:, None]
    place = (start + token)[:, None] * output_stride + head[:, None] * DIM + dim[None, :]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=live[:, None] & inside)


@dataclass(slots=True)
class Tiles:
    """Rows of one kind of tile: int64 [tiles] each."""

    rows: int
    """Lines of a tile, all heads of a group counted."""
    sequence: Tensor
    first: Tensor


@dataclass(slots=True)
class PagedStep:
    """What all layers of a step share; int64 on the device."""

    tables: Tensor
    """[sequences, blocks of the longest]."""
    starts: Tensor
    counts: Tensor
    contexts: Tensor
    tiles: list[Tiles]

    def refill(self, tables: NDArray[np.int64], contexts: NDArray[np.int64]) -> None:
        """As ``graphs.Steady``."""
        shipped = ship([tables, contexts], self.tables.device)
        self.tables[:, : tables.shape[1]].copy_(shipped[0].view(tables.shape))
        self.contexts.copy_(shipped[1])


class TritonAttention:
    """Our kernel, for any CUDA device; on a CPU in the interpreter."""

    name = "triton"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._held: Tensor | None = None
        self._few = max(LEAST_ROWS, triton.next_power_of_2(shape.group))
        self._many = max(PROMPT_ROWS if shape.head_dim <= 128 else PROMPT_ROWS // 2, self._few)

    @classmethod
    def unsupported(cls, shape: AttentionShape, device: torch.device) -> str | None:
        """Why it cannot run this, or None."""
        if device.type != "cuda" and not INTERPRETED:
            return f"device {device}: Triton compiles for GPUs"
        if shape.unusual:
            return f"{shape.unusual} are not in this kernel"
        return as_computed_only(shape)

    def prepare(self, batch: Batch, window: int = 0) -> PagedStep:
        """Lay the tables out, cut prompt chunks into tiles; one copy to the device."""
        counts = np.array(batch.query_lens, dtype=np.int64)
        width = max(map(len, batch.blocks))
        tables = np.zeros((len(batch.blocks), width), dtype=np.int64)
        for line, blocks in zip(tables, batch.blocks, strict=True):
            line[: len(blocks)] = blocks
        kinds = [(self._few, np.flatnonzero(counts == 1)), (self._many, np.flatnonzero(counts > 1))]
        cuts = [(rows, *_cut(members, counts, rows // self._shape.group)) for rows, members in kinds if len(members)]
        shipped = ship(
            [
                tables,
                np.array(batch.starts),
                counts,
                np.array(batch.context_lens),
                *(part for _, sequence, first in cuts for part in (sequence, first)),
            ],
            batch.slots.device,
        )
        head, rest = shipped[:4], shipped[4:]
        tiles = [Tiles(rows, *rest[2 * index : 2 * index + 2]) for index, (rows, _, _) in enumerate(cuts)]
        return PagedStep(head[0].view(tables.shape), head[1], head[2], head[3], tiles)

    @staticmethod
    def compiled() -> int:
        """Forms of the kernel that this process has made ready, for all devices."""
        return sum(len(forms[0]) for forms in getattr(_attend, "device_caches", {}).values())

    def hold(self, rows: int, width: int, cache: KvCache) -> PagedStep:
        """As ``graphs.GraphBackend``; the first call should be the one with most rows.

        One is replayed at a time, so all have their tables in the same memory: at a long context they take most of it.
        """

        def numbers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=cache.data.device)

        if self._held is None or self._held.shape[1] != width or len(self._held) < rows:
            self._held = numbers(rows, width)
        every = torch.arange(rows, device=cache.data.device)
        tiles = [Tiles(self._few, every, numbers(rows))]
        return PagedStep(self._held[:rows], every, numbers(rows, fill=1), numbers(rows, fill=1), tiles)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: KvCache, step: PagedStep
    ) -> Tensor:
        """As ``AttentionBackend.attend``."""
        shape = self._shape
        if queries.stride()[1:] != (shape.head_dim, 1):
            queries = queries.contiguous()
        key_rows, value_rows = cache.rows(layer)
        output = torch.empty(len(queries), shape.heads * shape.head_dim, dtype=queries.dtype, device=queries.device)
        for tiles in step.tiles:
            kernel: Any = _attend[(len(tiles.sequence), shape.kv_heads)]
            kernel(
                queries,
                output,
                key_rows,
                value_rows,
                step.tables,
                step.starts,
                step.counts,
                step.contexts,
                tiles.sequence,
                tiles.first,
                step.tables.shape[1],
                shape.scale,
                queries.stride(0),
                output.stride(0),
                key_rows.stride(0),
                GROUP=shape.group,
                DIM=shape.head_dim,
                DIM_PADDED=max(16, triton.next_power_of_2(shape.head_dim)),
                BLOCK=cache.block_size,
                ROWS=tiles.rows,
                WALK=KEYS,
                WIDE=INTERPRETED,
            )
        return output


def _cut(members: np.ndarray, counts: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of ``tokens`` rows each: (sequence, first row within its chunk)."""
    pieces = -(-counts[members] // tokens)
    sequence = np.repeat(members, pieces)
    first = np.concatenate([np.arange(count) * tokens for count in pieces])
    return sequence, first
