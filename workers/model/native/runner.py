"""``workers.engine.plan.Runner`` over the kernel: lay the plan out as int32 arrays, one call, sample."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from workers.engine import scoring
from workers.engine.plan import Chunk, Sampled, StepPlan, StepResult
from workers.engine.sequence import Sequence
from workers.engine.verify import fold, standings
from workers.model.deltas import used
from workers.model.host_tier import HostTier, prepare
from workers.model.masks import allows
from workers.model.native.adapters import NativeAdapter
from workers.model.native.decoder import CHOICE, NativeCache, NativeDecoder, Rows
from workers.model.philox import uniforms
from workers.model.sampler import COLDEST, sample
from workers.model.scores import Scored, score, scored


class NativeRunner:
    """Runs plans on the CPU kernel."""

    def __init__(self, decoder: NativeDecoder, cache: NativeCache) -> None:
        self.decoder, self.cache = decoder, cache
        self._adapters: dict[str, NativeAdapter] = {}
        self.host: HostTier | None = None
        """The tier below the cache."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Save, zero, restore, copy, compute, sample, in this order.

        Raises ValueError for a plan that does not fit its sequences, SequenceFault for an adapter that is not held.
        """
        prepare(plan, self.cache, self.host)
        if not plan.chunks:
            return StepResult([])
        scores: list[Scored] = []
        rows, samplers, own = layout(plan, self.cache.block_size, scores)
        adapters, which = used(plan.chunks, self._adapters)
        if adapters:
            rows.lora.extend(which)
        drawn, choices = _choices(len(rows.sample_rows), samplers, own)
        logits, best = self.decoder.forward(rows, choices, adapters)
        told = score(logits, scores) if scores else []
        return StepResult(fold(plan.chunks, _sampled(logits, best, samplers, own, drawn)), told)

    @torch.inference_mode()
    def likeliest(self, chunks: list[Chunk]) -> list[int]:
        """Compute chunks; the likeliest next token of each that samples (``draft.py``)."""
        rows, _, own = layout(StepPlan(0, chunks), self.cache.block_size)
        _, best = self.decoder.forward(rows)
        return [max(0, best[row]) for row in own]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (source, destination), at once."""
        with torch.inference_mode():
            self.cache.copy(pairs)

    @torch.inference_mode()
    def logits(self, chunk: Chunk) -> Tensor:
        """fp32 logits [count, vocab] of every row of one chunk: to measure a model, not to serve with."""
        rows, _, _ = layout(StepPlan(0, [chunk]), self.cache.block_size)
        rows.sample_rows = array("i", range(chunk.count))
        return self.decoder.forward(rows)[0].clone()

    def zero_blocks(self, blocks: list[int]) -> None:
        """Overwrite the keys and values of ``blocks`` with zeros, at once."""
        with torch.inference_mode():
            self.cache.zero(blocks)

    def install(self, digest: str, weights: object) -> None:
        """Use an adapter for sequences that name ``digest``."""
        assert isinstance(weights, NativeAdapter)
        self._adapters[digest] = weights

    def remove(self, digest: str) -> None:
        """Free an adapter that no sequence names any more: no thread of the kernel reads it between steps."""
        del self._adapters[digest]


def _sampled(
    logits: Tensor, best: array[int], samplers: list[Sequence], own: list[int], drawn: set[int]
) -> list[Sampled]:
    """What the kernel chose, where it could choose; the sampler is asked for the others."""
    choosy = [
        place
        for place, one in enumerate(samplers)
        if best[own[place]] < 0 or not (own[place] in drawn or _takes(one, best[own[place]]))
    ]
    if not choosy:
        return [Sampled([best[row]]) for row in own]
    if len(choosy) == len(samplers):
        # Rows of the kernel are padded; the sampler's lie one after the other.
        every = own == list(range(len(logits)))
        return sample(logits.contiguous() if every else logits[torch.tensor(own)], samplers)
    chosen = sample(logits[torch.tensor([own[place] for place in choosy])], [samplers[place] for place in choosy])
    sampled = [Sampled([best[row]]) for row in own]
    for place, one in zip(choosy, chosen, strict=True):
        sampled[place] = one
    return sampled


def _takes(sequence: Sequence, token: int) -> bool:
    """Whether the kernel's choice is the answer: the sampler is only asked where it could say anything else.

    The most likely token of all is the most likely that a grammar allows, if it allows it.
    """
    if not _greedy(sequence):
        return False
    return sequence.constraint is None or allows(sequence.constraint, token)


def _choices(rows: int, samplers: list[Sequence], own: list[int]) -> tuple[set[int], bytearray | None]:
    """Which rows the kernel draws from, and how. Rows that several choices draw from are the sampler's."""
    once = Counter(own)
    found = [
        (row, one)
        for row, one in zip(own, samplers, strict=True)
        if one.params.temperature > 0 and one.constraint is None and _plain(one) and once[row] == 1
    ]
    if not found:
        return set(), None
    numbers = uniforms((one.seed for _, one in found), (len(one.tokens) for _, one in found))
    choices = bytearray(rows * CHOICE.size)
    for (row, one), number in zip(found, numbers.tolist(), strict=True):
        params = one.params
        temperature = max(params.temperature, COLDEST)
        CHOICE.pack_into(
            choices, row * CHOICE.size, temperature, params.top_p, params.min_p, min(params.top_k, 2**31 - 1), number
        )
    return {row for row, _ in found}, choices


def _greedy(sequence: Sequence) -> bool:
    """True when the most likely token is the answer, whatever else the sampler could do."""
    return sequence.params.temperature == 0 and _plain(sequence)


def _plain(sequence: Sequence) -> bool:
    """Whether logits are taken as they are, and only the token is wanted."""
    params = sequence.params
    return (
        sequence.search is None
        and params.typical_p >= 1
        and params.logprobs is None
        and not params.logit_bias
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.bad_words
        and sequence.output_len >= params.min_tokens
    )


def layout(plan: StepPlan, size: int, scores: list[Scored] | None = None) -> tuple[Rows, list[Sequence], list[int]]:
    """The plan's chunks one after the other, its samplers, and each sampler's index among the rows that have logits.

    ``scores`` gets the rows that score prompts.
    """
    rows = Rows()
    samplers: list[Sequence] = []
    own: list[int] = []
    more: list[tuple[array[int], array[int]]] = []
    for chunk in plan.chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.start + chunk.count
        blocks = sequence.blocks
        known = end - len(chunk.drafts)
        if known > len(sequence.tokens) or end > len(blocks) * size or known <= start:
            raise ValueError(
                f"chunk [{start}, {end}) does not fit sequence {sequence.id!r}: {len(sequence.tokens)} tokens, "
                f"{len(blocks)} blocks of {size}"
            )
        rows.first.append(len(rows.tokens))
        rows.count.append(chunk.count)
        if sequence.slid:
            _add_tables(rows, more, chunk, size)
        else:
            rows.table.append(len(rows.blocks))
            rows.blocks.extend(blocks)
        if sequence.slid:
            rows.tokens.extend(sequence.tokens[start:known])
            rows.tokens.extend(chunk.drafts)
            rows.positions.extend(range(start, end))
        elif chunk.count == 1:
            rows.tokens.append(sequence.tokens[start])
            rows.positions.append(start)
            rows.slots.append(blocks[start // size] * size + start % size)
        else:
            rows.tokens.extend(sequence.tokens[start:known])
            rows.tokens.extend(chunk.drafts)
            rows.positions.extend(range(start, end))
            rows.slots.extend(_slots(blocks, start, end, size))
        if plan.scores and scores is not None and (part := scored(chunk, len(rows.sample_rows))) is not None:
            scores.append(part)
            rows.sample_rows.extend(rows.first[-1] + row for row in scoring.rows(chunk))
        if chunk.drafts:
            samplers += standings(chunk)
            checked = len(chunk.drafts) + 1
            own += range(len(rows.sample_rows), len(rows.sample_rows) + checked)
            rows.sample_rows.extend(range(len(rows.tokens) - checked, len(rows.tokens)))
        elif chunk.samplers:
            samplers += chunk.samplers
            own += [len(rows.sample_rows)] * len(chunk.samplers)
            rows.sample_rows.append(len(rows.tokens) - 1)
    for slots, table in more:
        rows.slots.extend(slots)
        rows.table.extend(table)
    return rows, samplers, own


def _slots(blocks: list[int], start: int, end: int, size: int) -> Iterator[int]:
    """Where the tokens [start, end) of a sequence go."""
    for block in range(start // size, -(-end // size)):
        base = (blocks[block] - block) * size
        yield from range(base + max(start, block * size), base + min(end, (block + 1) * size))


def _add_tables(rows: Rows, more: list[tuple[array[int], array[int]]], chunk: Chunk, size: int) -> None:
    """A chunk's slots and tables: the first table's to ``rows``, those of table t to ``more[t - 1]``.

    Entries of blocks that were given back are filled with a block of the sequence: keys behind them are read, and
    replaced.
    """
    sequence = chunk.sequence
    while len(more) < len(sequence.others):
        more.append((array("i"), array("i")))
    targets = [(rows.slots, rows.table), *more]
    for (slots, table), blocks, slid in zip(targets, sequence.tables(), sequence.slid, strict=True):
        slots.extend(_slots(blocks, chunk.start, chunk.start + chunk.count, size))
        table.append(len(rows.blocks))
        rows.blocks.extend(blocks[slid : slid + 1] * slid + blocks[slid:])
