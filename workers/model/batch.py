"""A plan's chunks laid on one flat token axis: built once per step, shared by all layers and the attention backend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.plan import Chunk
from workers.engine.scoring import rows as scoring_rows
from workers.engine.sequence import Sequence
from workers.engine.verify import standings
from workers.model.scores import Scored, scored
from workers.model.staging import ship

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Table:
    """Where one block table has the rows' keys and values, and its entries, as ``Layout``'s."""

    slots: Ints
    blocks: list[list[int]]


@dataclass(slots=True)
class Layout:
    """A plan's chunks one after the other, on the host. No row is padding: there are exactly the planned ones."""

    tokens: Ints
    positions: Ints
    slots: Ints
    """Where each row's keys and values go."""
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
    """Rows whose logits are wanted, in order: those that score a prompt; one per chunk that samples, and one more for
    each of its drafts."""
    scores: list[Scored] = field(default_factory=list)
    """Which of ``logit_rows`` score prompts."""
    samplers: list[Sequence] = field(default_factory=list)
    more: list[Table] = field(default_factory=list)
    """Of a model with several block tables: those after the first, which is ``slots`` and ``blocks``."""
    sampler_rows: list[int] = field(default_factory=list)
    """For each sampler the index into ``logit_rows``; n choices share their prompt's last row."""

    @property
    def decodes_only(self) -> bool:
        """Whether every sequence has one row."""
        return len(self.tokens) == len(self.query_lens)


@dataclass(slots=True)
class Batch:
    """Rows of one forward pass: a layout whose rows are on the device."""

    layout: Layout
    tokens: Tensor
    """int64 [rows]."""
    positions: Tensor
    """int64 [rows]."""
    slots: Tensor
    """int64 [rows]."""
    rows: Tensor
    """int64: ``layout.logit_rows``."""
    more: list[Tensor] = field(default_factory=list)
    """Slots of ``layout.more``."""

    def of_table(self, table: int) -> Batch:
        """The same rows, with the slots and blocks of one of the model's tables."""
        if not table:
            return self
        other = self.layout.more[table - 1]
        layout = replace(self.layout, slots=other.slots, blocks=other.blocks)
        return replace(self, layout=layout, slots=self.more[table - 1])

    @property
    def query_lens(self) -> list[int]:
        """As the layout's."""
        return self.layout.query_lens

    @property
    def starts(self) -> list[int]:
        """As the layout's."""
        return self.layout.starts

    @property
    def context_lens(self) -> list[int]:
        """As the layout's."""
        return self.layout.context_lens

    @property
    def blocks(self) -> list[list[int]]:
        """As the layout's."""
        return self.layout.blocks

    def token_slots(self, sequence: int, end: int, start: int = 0) -> Ints:
        """Slots of the tokens [start, end) of a sequence of this batch."""
        return _slots(self.blocks[sequence], start, end, self.layout.block_size)


def build(chunks: Items[Chunk], block_size: int, device: torch.device) -> Batch:
    """Lay out ``chunks`` and place them on the device. Raises ValueError as ``lay_out``."""
    return place(lay_out(chunks, block_size), device)


def place(layout: Layout, device: torch.device) -> Batch:
    """The layout's rows on the device, in one copy."""
    own = [layout.tokens, layout.positions, layout.slots, np.array(layout.logit_rows)]
    tokens, positions, slots, rows, *more = ship([*own, *(table.slots for table in layout.more)], device)
    return Batch(layout, tokens, positions, slots, rows, more)


def lay_out(chunks: Items[Chunk], block_size: int, *, scoring: bool = False) -> Layout:
    """Lay out ``chunks``, in their order. ``scoring``: some may be of prompts that are scored.

    Raises ValueError when a chunk reaches past its sequence's tokens or blocks: the plan is wrong.
    """
    tokens, lens, contexts, starts, rows = array("q"), [], [], [], 0
    positions: list[Ints] = []
    slots: list[Ints] = []
    batch_logits: list[int] = []
    samplers: list[Sequence] = []
    sampler_rows: list[int] = []
    scores: list[Scored] = []
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
        known = end - len(chunk.drafts)
        if known > len(sequence.tokens) or end > len(sequence.blocks) * block_size or known <= start:
            raise ValueError(
                f"chunk [{chunk.start}, {end}) does not fit sequence {sequence.id!r}: {len(sequence.tokens)} tokens, "
                f"{len(sequence.blocks)} blocks of {block_size}"
            )
        count = end - start
        tokens.extend(sequence.tokens[start:known])
        tokens.extend(chunk.drafts)
        positions.append(np.arange(start, end))
        slots.append(_slots(sequence.blocks, start, end, block_size))
        lens.append(count)
        contexts.append(end)
        starts.append(rows)
        if scoring and (part := scored(chunk, len(batch_logits))) is not None:
            scores.append(part)
            batch_logits += (rows + row for row in scoring_rows(chunk))
        rows += count
        if chunk.drafts:
            own_rows = range(rows - len(chunk.drafts) - 1, rows)
            sampler_rows += range(len(batch_logits), len(batch_logits) + len(own_rows))
            batch_logits += own_rows
            samplers += standings(chunk)
        elif chunk.samplers:
            samplers += chunk.samplers
            sampler_rows += [len(batch_logits)] * len(chunk.samplers)
            batch_logits.append(rows - 1)
    return Layout(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        query_lens=lens,
        starts=starts,
        context_lens=contexts,
        blocks=[chunk.sequence.blocks for chunk in chunks],
        block_size=block_size,
        logit_rows=batch_logits,
        samplers=samplers,
        scores=scores,
        sampler_rows=sampler_rows,
        more=[_table(chunks, number, block_size) for number in range(len(chunks[0].sequence.others))],
    )


def _slots(blocks: list[int], start: int, end: int, size: int) -> Ints:
    """Of the tokens [start, end) of a sequence with these blocks."""
    if end - start == 1:
        return np.array([blocks[start // size] * size + start % size])
    first = start // size
    table = np.array(blocks[first : -(-end // size)], dtype=np.int64)
    return (table[:, None] * size + np.arange(size)).reshape(-1)[start - first * size : end - first * size]


def _table(chunks: Items[Chunk], number: int, size: int) -> Table:
    """Of every sequence its table ``number`` + 1."""
    tables = [chunk.sequence.others[number] for chunk in chunks]
    slots = [
        _slots(blocks, chunk.start, chunk.start + chunk.count, size)
        for chunk, blocks in zip(chunks, tables, strict=True)
    ]
    return Table(np.concatenate(slots), tables)
