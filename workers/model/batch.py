"""A plan's chunks laid on one flat token axis: built once per step, shared by all layers and the attention backend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """Rows of one forward pass. No row is padding: ``tokens`` has exactly the planned ones."""

    tokens: Tensor
    """int64 [rows], on the device."""
    positions: Tensor
    """int64 [rows], on the device."""
    slots: Tensor
    """int64 [rows]: where each row's keys and values go."""
    query_lens: list[int]
    """Rows of each sequence; they lie one sequence after the other."""
    starts: list[int]
    """First row of each sequence."""
    context_lens: list[int]
    """Tokens each sequence's last row may attend to, itself included."""
    blocks: list[list[int]]
    """Each sequence's block table."""
    block_size: int
    logit_rows: list[int] = field(default_factory=list)
    """Rows whose logits are wanted, one per chunk that samples."""
    samplers: list[Sequence] = field(default_factory=list)
    sampler_rows: list[int] = field(default_factory=list)
    """For each sampler the index into ``logit_rows``; n choices share their prompt's last row."""

    def token_slots(self, sequence: int, count: int) -> Ints:
        """Slots of the first ``count`` tokens of a sequence of this batch."""
        size = self.block_size
        table = np.array(self.blocks[sequence][: -(-count // size)], dtype=np.int64)
        return (table[:, None] * size + np.arange(size)).reshape(-1)[:count]


def build(chunks: Items[Chunk], block_size: int, device: torch.device) -> Batch:
    """Lay out ``chunks``, in their order.

    Raises ValueError when a chunk reaches past its sequence's tokens or blocks: the plan is wrong.
    """
    tokens, lens, contexts, starts, rows = array("q"), [], [], [], 0
    positions: list[Ints] = []
    slots: list[Ints] = []
    batch_logits: list[int] = []
    samplers: list[Sequence] = []
    sampler_rows: list[int] = []
    offsets = np.arange(block_size)
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
        if end > len(sequence.tokens) or end > len(sequence.blocks) * block_size or chunk.count < 1:
            raise ValueError(
                f"chunk [{chunk.start}, {end}) does not fit sequence {sequence.id!r}: {len(sequence.tokens)} tokens, "
                f"{len(sequence.blocks)} blocks of {block_size}"
            )
        count = end - start
        tokens.extend(sequence.tokens[start:end])
        if count == 1:
            positions.append(np.array([start]))
            slots.append(np.array([sequence.blocks[start // block_size] * block_size + start % block_size]))
        else:
            first = start // block_size
            table = np.array(sequence.blocks[first : -(-end // block_size)], dtype=np.int64)
            own = (table[:, None] * block_size + offsets).reshape(-1)
            positions.append(np.arange(start, end))
            slots.append(own[start - first * block_size : end - first * block_size])
        lens.append(count)
        contexts.append(end)
        starts.append(rows)
        rows += count
        if chunk.samplers:
            samplers += chunk.samplers
            sampler_rows += [len(batch_logits)] * len(chunk.samplers)
            batch_logits.append(rows - 1)
    return Batch(
        tokens=_to(np.frombuffer(tokens, dtype=np.int64), device),
        positions=_to(np.concatenate(positions), device),
        slots=_to(np.concatenate(slots), device),
        query_lens=lens,
        starts=starts,
        context_lens=contexts,
        blocks=[chunk.sequence.blocks for chunk in chunks],
        block_size=block_size,
        logit_rows=batch_logits,
        samplers=samplers,
        sampler_rows=sampler_rows,
    )


def _to(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(values.copy()).to(device, non_blocking=True)
