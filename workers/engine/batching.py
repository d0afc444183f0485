"""What goes into a step: continuous batching under one token budget.

Rules
- Every step, computed tokens catch up with known tokens: decodes first, then prompts under way, then new ones, until
  the budget is spent (``allowance.py``: how much of it a chunk takes). Chunked prefill, prefix hits and recompute after
  preemption are this one rule (iteration-level scheduling: Yu et al., "Orca", OSDI 2022, §3; chunks beside decodes:
  Agrawal et al., "Sarathi-Serve", OSDI 2024, §4).
- Out of blocks: a victim is put back in line and computed again later; where there is a host tier, what nobody else
  could hit of it waits there (``tiers.py``). A step with a victim admits nobody. Who is victim: ``ServiceCounters``;
  how often at most and why that cannot deadlock: ``Roster``.
- More decodes than budget: the turn goes round in order of arrival, so each gets a token every few steps.
- The cost of a step is linear in what runs; cached blocks and the length of the waiting line do not matter.
"""

from __future__ import annotations

import sys
from bisect import bisect_right

from workers.config import EngineConfig
from workers.engine import scoring
from workers.engine.allowance import Allowance
from workers.engine.drafting import Drafting
from workers.engine.plan import Chunk, StepPlan
from workers.engine.roster import Roster
from workers.engine.sequence import Sequence
from workers.engine.waiting import by_arrival

RECHECK_STEPS = 8
"""A blocked head looks the prefix cache up again after so many steps even if no block became available."""


class Batching:
    """Fills the plans of one roster."""

    def __init__(
        self, roster: Roster, config: EngineConfig, drafting: Drafting | None = None, twice_at: int = 0
    ) -> None:
        self._drafting = drafting
        self._twice_at = twice_at
        self._roster = roster
        self._pool = roster.pool
        self._size = roster.limits.block_size
        self._slides = roster.limits.tables.slide
        self._config = config
        self._turn = -1
        """Arrival of the last sequence that got a row when the budget did not reach all; -1 when it did."""
        self._mixed = False
        """Whether the plan under way may have a decode behind a prompt chunk."""
        self._scorable = 0
        """Rows of prompts that the plan under way may still score."""
        self._blocked = (-1, 0, 0)
        """The head that did not fit: its arrival, available blocks at which to try again, step at which to anyway."""

    def fill(self, plan: StepPlan, now: int) -> bool:
        """Put chunks, copies and blocks to zero into an empty plan. False when there is nothing to do."""
        roster = self._roster
        self._scorable = scoring.MOST_ROWS
        if self._pool.dirty:
            plan.zero = self._pool.take_dirty()
        budget = self._config.max_step_tokens
        if self._config.kv_cache_reuse:
            prompts: list[Sequence] = []
            budget = self._decodes(plan, budget, prompts, now)
            decodes = self._config.max_step_tokens - budget
            room = Allowance(budget, min(decodes, self._config.step_overrun), self._twice_at if decodes else 0)
            self._prompts(plan, room, prompts, now)
        else:
            room = Allowance(self._whole(plan, budget, now))
        # Who just lost its blocks must not take them back in the same step, unless nothing else would run at all.
        admits = not roster.preempted or not plan.chunks
        roster.sweep()
        if admits and len(roster.waiting):
            self._admit(plan, room, now)
        if self._mixed:
            # Runners rely on decodes coming first.
            plan.chunks.sort(key=lambda chunk: not chunk.is_decode)
            self._mixed = False
        if self._drafting is not None:
            self._drafting.fill(plan)
        if not plan.chunks:
            plan.zero += self._pool.take_dirty()
        if roster.tiers is not None:
            plan.saves, plan.restores = roster.tiers.take_moves()
        return bool(plan.runs or plan.zero)

    @property
    def in_turn(self) -> bool:
        """Whether the last step had budget for every running sequence."""
        return self._turn < 0

    def passed(self, head: Sequence, first: int, last: int, available: int) -> None:
        """Steps ``first`` to ``last`` were made without planning, while ``head`` waited for blocks: note when it would
        have been looked at. ``available``: blocks after the first of them."""
        arrival, level, again = self._blocked
        look = first if arrival != head.arrival or available >= level else max(first, again)
        if look <= last:
            self._blocked = (
                head.arrival,
                self._roster.level(head),
                last - (last - look) % RECHECK_STEPS + RECHECK_STEPS,
            )

    def _order(self) -> list[Sequence]:
        """Running sequences, starting after the one whose turn was last."""
        running = self._roster.running
        if self._turn < 0:
            return running
        start = bisect_right(running, self._turn, key=by_arrival)
        self._turn = -1
        return running[start:] + running[:start]

    def _decodes(self, plan: StepPlan, budget: int, prompts: list[Sequence], now: int) -> int:
        """One row for each sequence with one token to compute; the others go to ``prompts``. Returns what is left."""
        roster = self._roster
        ref = self._pool.ref
        size = self._size
        chunks = plan.chunks
        append = chunks.append
        many = roster.many is not None
        last = -1
        for sequence in self._order():
            computed = sequence.computed
            if len(sequence.tokens) - computed != 1 or sequence.high_water < sequence.prompt_len:
                if len(sequence.tokens) > computed:  # not a beam that waits for the others
                    prompts.append(sequence)
                continue
            if computed < sequence.prompt_len:
                self._mixed = True  # its prompt was computed but gave no token; choices may share its last block
            if budget <= 0:
                self._turn = last
                break
            if roster.preempted and roster.departed(sequence):
                continue
            blocks = sequence.blocks
            if many:
                covered, budget = self._covered(plan, sequence, computed + 1, budget, now)
                if not covered:
                    continue
                append(Chunk(sequence, computed, 1, (sequence,)))
                budget -= 1
                last = sequence.arrival
                continue
            index = computed // size
            if index == len(blocks):
                block, budget = self._block(plan, sequence, budget, now)
                if block < 0:
                    continue
                blocks.append(block)
            elif ref[blocks[index]] > 1:
                block, budget = self._block(plan, sequence, budget, now)
                if block < 0:
                    continue
                plan.copies.append((blocks[index], block))
                self._pool.release(blocks[index : index + 1])
                blocks[index] = block
            append(Chunk(sequence, computed, 1, (sequence,)))
            budget -= 1
            last = sequence.arrival
        return budget

    def _block(self, plan: StepPlan, sequence: Sequence, budget: int, now: int) -> tuple[int, int]:
        """A block for ``sequence``, from a victim if need be, or -1 when it is the victim; and the budget then left."""
        roster = self._roster
        while True:
            block = roster.grow(sequence)
            if block >= 0:
                return block, budget
            given = self._give_way(plan, sequence, now)
            if given is None:
                return -1, budget
            budget += given
            if roster.departed(sequence):
                return -1, budget

    def _covered(self, plan: StepPlan, sequence: Sequence, end: int, budget: int, now: int) -> tuple[bool, int]:
        """``_block`` for a model with several tables: blocks for the rows up to ``end`` in all of them, or in none."""
        roster = self._roster
        while True:
            assert roster.many is not None
            copies = roster.many.cover(sequence, end)
            if copies is not None:
                plan.copies += copies
                return True, budget
            given = self._give_way(plan, sequence, now)
            if given is None:
                return False, budget
            budget += given
            if roster.departed(sequence):
                return False, budget

    def _give_way(self, plan: StepPlan, sequence: Sequence, now: int) -> int | None:
        """Somebody, maybe ``sequence`` itself, loses its blocks; rows of the plan that are free now. None: nobody."""
        roster = self._roster
        # Purged blocks given back in this step are there in the next, zeroed: no reason for another victim.
        victim = None if self._pool.dirty else roster.victim()
        if victim is None:
            return None
        group = set(roster.group(victim))
        lost = {block for one in group for block in one.held()}
        roster.preempt(victim, now, copies=plan.copies)
        given = sum(chunk.count for chunk in plan.chunks if chunk.sequence in group)
        plan.chunks[:] = [chunk for chunk in plan.chunks if chunk.sequence not in group]
        if plan.copies:
            plan.copies = [copy for copy in plan.copies if copy[1] not in lost]
        return given

    def _prompts(self, plan: StepPlan, room: Allowance, prompts: list[Sequence], now: int) -> None:
        """The next chunk of prompts (and recomputes) under way, oldest first."""
        for sequence in prompts:
            if not room.open:
                break
            if self._roster.preempted and self._roster.departed(sequence):
                continue
            if scoring.pending(sequence) and not self._scorable:
                continue
            rows = self._fit(room, sequence)
            if rows and self._slides:  # a table with a window has blocks for the rows that come next only
                covered, room.rows = self._covered(plan, sequence, sequence.computed + rows, room.rows, now)
                if not covered:
                    continue
            self._chunk(plan, sequence, room, rows)

    def _fit(self, room: Allowance, sequence: Sequence) -> int:
        """How many of its uncomputed tokens the step has room for."""
        return room.fit(sequence.computed, self._rows(sequence), len(sequence.tokens))

    def _rows(self, sequence: Sequence) -> int:
        """Its uncomputed tokens, at most a chunk of them; of a prompt that is scored, what the step may still score."""
        most = self._config.max_chunk_tokens or sys.maxsize
        if scoring.pending(sequence):
            most = min(most, self._scorable)
        return min(len(sequence.tokens) - sequence.computed, most)

    def _chunk(self, plan: StepPlan, sequence: Sequence, room: Allowance, rows: int) -> None:
        """Its next ``rows`` uncomputed tokens, as ``_fit`` says."""
        start = sequence.computed
        known = len(sequence.tokens)
        room.book(start, rows, self._rows(sequence))
        if not rows:
            return
        if scoring.pending(sequence):
            self._scorable -= rows
            plan.scores = True
        samplers: tuple[Sequence, ...] = ()
        if start + rows == known:
            samplers = (sequence,)
            if sequence.siblings and sequence.search is None:
                roster = self._roster
                # Slots of other leads' choices are spoken for; at least its own were kept free at admission.
                free = roster.slots.limit - len(roster.running) - (roster.riders - len(sequence.siblings))
                samplers = (sequence, *sequence.siblings[: max(0, free)])
        if rows == 1 and start >= sequence.prompt_len:
            self._mixed = True
        plan.chunks.append(Chunk(sequence, start, rows, samplers))

    def _whole(self, plan: StepPlan, budget: int, now: int) -> int:
        """Without a KV cache: every known token of every sequence again, for comparison. At least one sequence."""
        size = self._size
        last = -1
        for sequence in self._order():
            if self._roster.preempted and self._roster.departed(sequence):
                continue
            rows = len(sequence.tokens)
            if plan.chunks and rows > budget:
                self._turn = last
                return 0
            if scoring.pending(sequence) and not self._scorable:
                continue
            block = 0
            if self._roster.many is not None:
                covered, budget = self._covered(plan, sequence, rows, budget, now)
                block = 0 if covered else -1
            while block >= 0 and len(sequence.blocks) * size < rows:
                block, budget = self._block(plan, sequence, budget, now)
                if block >= 0:
                    sequence.blocks.append(block)
            if block >= 0:
                self._all(plan, sequence)
                budget -= rows
                last = sequence.arrival
        return budget

    def _all(self, plan: StepPlan, sequence: Sequence) -> None:
        """Every known token of a sequence. One prompt a step is scored, and goes on when it is scored to its end."""
        chunk = Chunk(sequence, 0, len(sequence.tokens), (sequence,))
        if scoring.pending(sequence):
            plan.scores = True
            self._scorable = 0
            if sequence.scored + len(scoring.rows(chunk)) < sequence.prompt_len - 1:
                chunk.samplers = ()
        plan.chunks.append(chunk)

    def _admit(self, plan: StepPlan, room: Allowance, now: int) -> None:
        """Let the head of the line in while there are slots, blocks and budget. A static batch is filled at once."""
        roster = self._roster
        static = self._config.mode == "static"
        fresh_batch = static and not roster.running
        whole = not self._config.kv_cache_reuse
        while room.open or fresh_batch:
            head = roster.waiting.head()
            if head is None or not roster.room(head):
                return
            if static and not fresh_batch and not roster.waiting.returned:
                return
            known = len(head.tokens)
            fits = room.open and (not whole or not plan.chunks or known <= room.rows)
            if not fits and not fresh_batch:
                return
            arrival, level, again = self._blocked
            if arrival == head.arrival and roster.running and self._pool.available < level and plan.step < again:
                return
            missing = roster.admit(head, now)
            if missing:
                self._blocked = (head.arrival, self._pool.available + missing, plan.step + RECHECK_STEPS)
                return
            if not fits or (scoring.pending(head) and not self._scorable):
                continue  # its turn comes; whoever is behind it in line need not wait for that
            if whole:
                self._all(plan, head)
                room.rows -= known
            else:
                self._chunk(plan, head, room, self._fit(room, head))
