"""Makes the plan of each step and books its result: continuous batching under one token budget. No clock, no I/O.

Rules
- Every step, computed tokens catch up with known tokens: decodes first, then prompts under way, then new ones, until
  the budget is spent. Chunked prefill, prefix hits and recompute after preemption are this one rule (iteration-level
  scheduling: Yu et al., "Orca", OSDI 2022, §3; chunks beside decodes: Agrawal et al., "Sarathi-Serve", OSDI 2024, §4).
- ``plan`` and ``commit`` (or ``fail``) alternate. What a plan changes before its commit: blocks are taken, victims lose
  theirs. What only the commit changes: computed tokens, output, published blocks, choices that fork.
- Out of blocks: a victim is put back in line and computed again later (recompute), never swapped. A step with a victim
  admits nobody. Who is victim: ``ServiceCounters``; how often at most and why that cannot deadlock: ``Roster``.
- More decodes than budget: the turn goes round in order of arrival, so each gets a token every few steps.
- The cost of a step is linear in what runs; cached blocks and the length of the waiting line do not matter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from itertools import count

from workers.config import EngineConfig
from workers.engine.block_pool import BlockPool
from workers.engine.commit import Commit
from workers.engine.outputs import last_output
from workers.engine.plan import Chunk, StepPlan, StepResult
from workers.engine.purge import PurgeTicket
from workers.engine.record import SequenceRecord
from workers.engine.request import Limits, SequenceMaker
from workers.engine.roster import Roster
from workers.engine.sequence import Sequence
from workers.engine.waiting import by_arrival
from workers.protocol import FinishReason, Generate, SequenceOutput, WorkerStats

RECHECK_STEPS = 8
"""A blocked head looks the prefix cache up again after so many steps even if no block became available."""


class Planner:
    """The engine without a device and without a thread.

    ``blocks``: size of the KV cache. ``max_context``: most prompt + output tokens. ``revision``: part of the prefix
    keys. ``vocab_size``: refuse token ids at or above it. ``records``: keep timings for telemetry.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        blocks: int,
        max_context: int,
        revision: str = "",
        eos_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        records: bool = False,
    ) -> None:
        self.config = config
        self.step = 0
        self.limits = Limits(blocks, config.block_size, max_context, vocab_size)
        self.pool = BlockPool(blocks, share=config.cache_share)
        self.roster = Roster(self.pool, self.limits, config.max_running)
        self._maker = SequenceMaker(
            revision=revision,
            eos=frozenset(eos_ids),
            block_size=config.block_size,
            prefix_cache=config.prefix_cache and config.kv_cache_reuse,
            seed=config.seed,
            records=records,
        )
        self._commit = Commit(self.roster, config.block_size, keep=config.kv_cache_reuse)
        self._ranks: Iterator[int] = count()
        self._open: StepPlan | None = None
        self._cancels: list[str] = []
        self._turn = -1
        """Arrival of the last sequence that got a row when the budget did not reach all; -1 when it did."""
        self._blocked = (-1, 0, 0)
        """The head that did not fit: its arrival, available blocks at which to try again, step at which to anyway."""

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self.roster.requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.roster.requests

    def add(self, generate: Generate, now: int = 0) -> list[Sequence]:
        """Take a request: its ``n`` sequences, in line, or all with ``finish="error"`` when it can never run.

        Raises ValueError for an id that is unfinished here already.
        """
        if generate.id in self.roster.requests:
            raise ValueError(f"id: {generate.id!r} is running already; request ids must be unique")
        refusal = self.limits.refusal(generate)
        sequences = self._maker.make(generate, self._ranks, now)
        if refusal is not None:
            for sequence in sequences:
                sequence.finish, sequence.error = "error", refusal
                sequence.finished_ns = now
                self.roster.archive(sequence)
        elif self.config.kv_cache_reuse:
            self.roster.enter(sequences)
        else:
            for sequence in sequences:  # without a cache there is nothing that choices could share
                self.roster.enter([sequence])
        return sequences

    def cancel(self, request_id: str, now: int = 0) -> list[SequenceOutput]:
        """End all sequences of a request; their last outputs. Unknown ids: none.

        Between plan and commit it waits for the commit, which returns the outputs: a device may be writing the blocks.
        """
        if self._open is not None:
            self._cancels.append(request_id)
            return []
        return self._end(request_id, "cancelled", now, None)

    def refuse(self, request_id: str, error: str, now: int = 0) -> list[SequenceOutput]:
        """End all sequences of a request with an error; their last outputs. RuntimeError while a plan is open."""
        if self._open is not None:
            raise RuntimeError("refuse: commit or fail the open plan first")
        return self._end(request_id, "error", now, error)

    def _end(self, request_id: str, finish: FinishReason, now: int, error: str | None) -> list[SequenceOutput]:
        ended = list(self.roster.requests.get(request_id, ()))
        for sequence in ended:
            self.roster.end(sequence, finish, now, error)
        self.roster.sweep()
        return [last_output(sequence, [], []) for sequence in ended]

    def plan(self, now: int = 0) -> StepPlan | None:
        """What to compute next; None when there is nothing. Raises RuntimeError while a plan is open."""
        if self._open is not None:
            raise RuntimeError("plan: the last plan was neither committed nor failed")
        plan = StepPlan(self.step + 1, started_ns=now)
        if self.pool.dirty:
            plan.zero = self.pool.take_dirty()
        budget = self.config.max_step_tokens
        if self.config.kv_cache_reuse:
            prompts: list[Sequence] = []
            budget = self._decodes(plan, budget, prompts, now)
            budget = self._prompts(plan, budget, prompts)
        else:
            budget = self._whole(plan, budget, now)
        # Who just lost its blocks must not take them back in the same step, unless nothing else would run at all.
        admits = not self.roster.preempted or not plan.chunks
        self.roster.sweep()
        if admits and len(self.roster.waiting):
            self._admit(plan, budget, now)
        if not plan.chunks and not plan.zero:
            return None
        self.step = plan.step
        self._open = plan
        return plan

    def _order(self, budget: int) -> list[Sequence]:
        """Running sequences, starting after the one whose turn was last."""
        running = self.roster.running
        if self._turn < 0:
            return running
        start = bisect_right(running, self._turn, key=by_arrival)
        self._turn = -1
        return running[start:] + running[:start]

    def _decodes(self, plan: StepPlan, budget: int, prompts: list[Sequence], now: int) -> int:
        """One row for each sequence with one token to compute; the others go to ``prompts``. Returns what is left."""
        roster = self.roster
        ref = self.pool.ref
        size = self.limits.block_size
        chunks = plan.chunks
        append = chunks.append
        last = -1
        for sequence in self._order(budget):
            computed = sequence.computed
            if len(sequence.tokens) - computed != 1 or sequence.siblings:
                prompts.append(sequence)
                continue
            if budget <= 0:
                self._turn = last
                break
            if roster.preempted and roster.departed(sequence):
                continue
            blocks = sequence.blocks
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
                self.pool.release(blocks[index : index + 1])
                blocks[index] = block
            append(Chunk(sequence, computed, 1, (sequence,)))
            budget -= 1
            last = sequence.arrival
        return budget

    def _block(self, plan: StepPlan, sequence: Sequence, budget: int, now: int) -> tuple[int, int]:
        """A block for ``sequence``, from a victim if need be, or -1 when it is the victim; and the budget then left."""
        roster = self.roster
        while True:
            block = roster.grow(sequence)
            if block >= 0:
                return block, budget
            victim = roster.victim()
            if victim is None:
                return -1, budget
            lost = set(victim.blocks)
            roster.preempt(victim, now)
            for index, chunk in enumerate(plan.chunks):
                if chunk.sequence is victim:
                    budget += chunk.count
                    del plan.chunks[index]
                    break
            if plan.copies:
                plan.copies = [copy for copy in plan.copies if copy[1] not in lost]
            if victim is sequence:
                return -1, budget

    def _prompts(self, plan: StepPlan, budget: int, prompts: list[Sequence]) -> int:
        """The next chunk of prompts (and recomputes) under way, oldest first."""
        for sequence in prompts:
            if budget <= 0:
                break
            if not (self.roster.preempted and self.roster.departed(sequence)):
                budget -= self._chunk(plan, sequence, budget)
        return budget

    def _chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        """As many of the sequence's uncomputed tokens as budget and cap allow. Returns how many."""
        start = sequence.computed
        known = len(sequence.tokens)
        rows = min(known - start, budget)
        cap = self.config.max_chunk_tokens
        if cap is not None and rows > cap:
            rows = cap
        samplers: tuple[Sequence, ...] = ()
        if start + rows == known:
            samplers = (sequence,)
            if sequence.siblings:
                roster = self.roster
                # Slots of other leads' choices are spoken for; at least its own were kept free at admission.
                free = roster.max_running - len(roster.running) - (roster.riders - len(sequence.siblings))
                samplers = (sequence, *sequence.siblings[: max(0, free)])
        plan.chunks.append(Chunk(sequence, start, rows, samplers))
        return rows

    def _whole(self, plan: StepPlan, budget: int, now: int) -> int:
        """Without a KV cache: every known token of every sequence again, for comparison. At least one sequence."""
        size = self.limits.block_size
        last = -1
        for sequence in self._order(budget):
            if self.roster.preempted and self.roster.departed(sequence):
                continue
            rows = len(sequence.tokens)
            if plan.chunks and rows > budget:
                self._turn = last
                return 0
            block = 0
            while block >= 0 and len(sequence.blocks) * size < rows:
                block, budget = self._block(plan, sequence, budget, now)
                if block >= 0:
                    sequence.blocks.append(block)
            if block >= 0:
                plan.chunks.append(Chunk(sequence, 0, rows, (sequence,)))
                budget -= rows
                last = sequence.arrival
        return budget

    def _admit(self, plan: StepPlan, budget: int, now: int) -> None:
        """Let the head of the line in while there are slots, blocks and budget. A static batch is filled at once."""
        roster = self.roster
        static = self.config.mode == "static"
        fresh_batch = static and not roster.running
        whole = not self.config.kv_cache_reuse
        while budget > 0 or fresh_batch:
            head = roster.waiting.head()
            if head is None or not roster.room(head):
                return
            if static and not fresh_batch and not roster.waiting.returned:
                return
            known = len(head.tokens)
            fits = budget > 0 and (not whole or not plan.chunks or known <= budget)
            if not fits and not fresh_batch:
                return
            arrival, level, again = self._blocked
            if arrival == head.arrival and roster.running and self.pool.available < level and plan.step < again:
                return
            missing = roster.admit(head, now)
            if missing:
                self._blocked = (head.arrival, self.pool.available + missing, plan.step + RECHECK_STEPS)
                return
            if not fits:
                continue
            if whole:
                plan.chunks.append(Chunk(head, 0, known, (head,)))
                budget -= known
            else:
                budget -= self._chunk(plan, head, budget)

    def commit(self, plan: StepPlan, result: StepResult, now: int = 0) -> list[SequenceOutput]:
        """Book what the runner computed; what is new about each sequence.

        Raises ValueError, before anything is changed, when the result does not fit the plan: then call ``fail``.
        """
        self._expect(plan)
        outputs = self._commit.apply(plan, result, now)
        self._open = None
        self.roster.sweep()
        return self._cancelled(outputs, now)

    def fail(self, plan: StepPlan, ids: Collection[str], error: str, now: int = 0) -> list[SequenceOutput]:
        """Instead of ``commit``: the runner raised. The requests ``ids`` end with ``error``, the rest is planned again.

        Whether the plan's copies were made is unknown, so sequences that depend on one are computed again.
        """
        self._expect(plan)
        self._open = None
        outputs: list[SequenceOutput] = []
        for request_id in dict.fromkeys(ids):
            outputs.extend(self._end(request_id, "error", now, error))
        copied = {target for _, target in plan.copies}
        if copied:
            for sequence in self.roster.running:
                if not copied.isdisjoint(sequence.blocks):
                    self.roster.preempt(sequence, now, "runner_error")
            self.roster.sweep()
        return self._cancelled(outputs, now)

    def _expect(self, plan: StepPlan) -> None:
        if plan is not self._open:
            raise RuntimeError(f"step {plan.step} is not the open plan")

    def _cancelled(self, outputs: list[SequenceOutput], now: int) -> list[SequenceOutput]:
        if self._cancels:
            cancels, self._cancels = self._cancels, []
            for request_id in cancels:
                outputs.extend(self._end(request_id, "cancelled", now, None))
        return outputs

    def purge(self, scopes: Collection[bytes]) -> PurgeTicket:
        """Make these scopes' blocks unreachable. Zero those of ``take_dirty`` afterwards; the ticket counts the rest.

        Raises RuntimeError while a plan is open.
        """
        if self._open is not None:
            raise RuntimeError("purge: commit the open plan first")
        blocks, pending = self.pool.purge(scopes)
        ticket = PurgeTicket(blocks, pending)
        for sequences in self.roster.requests.values():
            for sequence in sequences:
                if sequence.scope in scopes and sequence.scope:
                    sequence.purged = True
                    sequence.chain = None
                    if sequence.blocks:
                        ticket.users.update((sequence, *sequence.siblings))
        if ticket.users:
            self.roster.purges.open(ticket)
        return ticket

    def take_dirty(self) -> list[int]:
        """Purged blocks, free from now on: the caller zeroes them before it runs another plan."""
        return self.pool.take_dirty()

    def take_records(self) -> list[SequenceRecord]:
        """Records of sequences that ended since the last call."""
        records = self.roster.records
        if records:
            self.roster.records = []
        return records

    def stats(self, step_ms: float = 0.0) -> WorkerStats:
        """The live view. Used blocks include purged ones that wait to be zeroed."""
        pool, roster = self.pool, self.roster
        return WorkerStats(
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            used_blocks=pool.used,
            running=len(roster.running),
            waiting=len(roster.waiting),
            preemptions=roster.preemptions,
            hit_tokens=pool.hit_tokens,
            query_tokens=pool.query_tokens,
            hot_prefixes=pool.hot_prefixes(),
            step_ms=step_ms,
        )

    def check(self) -> None:
        """Assert every invariant; only between steps. O(everything)."""
        assert self._open is None
        self.roster.check()
