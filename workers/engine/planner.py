"""The engine without a device and without a thread: takes requests, makes plans, books results. No clock, no I/O.

Rules
- ``plan`` and ``commit`` (or ``fail``) alternate. What a plan changes before its commit: blocks are taken, victims lose
  theirs. What only the commit changes: computed tokens, output, published blocks, choices that fork.
- What goes into a step: ``batching.py``. What came of it: ``commit.py``. Who is where: ``roster.py``.
- Every sequence has exactly one last output: from ``add`` (refused), ``commit``, ``cancel``, ``fail`` or ``refuse``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import count

from workers.config import EngineConfig
from workers.engine.batching import Batching
from workers.engine.block_pool import BlockPool
from workers.engine.commit import Commit
from workers.engine.drafting import Drafting
from workers.engine.outputs import last_output
from workers.engine.plan import StepPlan, StepResult
from workers.engine.purge import PurgeTicket
from workers.engine.record import SequenceRecord
from workers.engine.request import Limits, SequenceMaker
from workers.engine.roster import Roster
from workers.engine.sequence import Sequence
from workers.engine.slots import Slots
from workers.engine.tables import Tables
from workers.engine.tiers import Tiers
from workers.protocol import FinishReason, Generate, SequenceOutput, WorkerStats

OWNERS = 32
"""Most tenants whose cached blocks are reported."""
OWNERS_EVERY = 32


class Planner:
    """The engine without a device and without a thread.

    ``blocks``: size of the KV cache. ``max_context``: most prompt + output tokens. ``revision``: part of the prefix
    keys. ``vocab_size``: refuse token ids at or above it. ``records``: keep timings for telemetry. ``tiers``: what lies
    below the device.
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
        tiers: Tiers | None = None,
        windows: tuple[int, ...] = (0,),
        twice_at: int = 0,
    ) -> None:
        """``windows``: of the model's block tables (``tables.py``). ``twice_at``: of its work (``allowance.py``)."""
        self.config = config
        self.tiers = tiers
        self.step = 0
        self._owners_at = 0
        self._owners_then: dict[str, int] = {}
        eos = frozenset(eos_ids)
        rows = min(config.step_rows, config.max_chunk_tokens or config.step_rows)
        if config.speculation is not None:
            rows = max(rows, 1 + config.speculation.tokens)
        if not config.kv_cache_reuse:
            windows = (0,) * len(windows)  # whole sequences are computed anew in every step: nothing is ever outside
        tables = Tables(windows, config.block_size, rows)
        self.limits = Limits(blocks, config.block_size, max_context, vocab_size, eos, tables)
        self.pool = BlockPool(blocks, share=config.cache_share)
        if tiers is not None:
            self.pool.on_evict = lambda block, key: tiers.save(key, block, self.pool.holding(block))
        self.roster = Roster(self.pool, self.limits, Slots(config, blocks, tables), tiers)
        self._maker = SequenceMaker(
            revision=revision,
            eos=eos,
            block_size=config.block_size,
            prefix_cache=config.prefix_cache and config.kv_cache_reuse,
            seed=config.seed,
            records=records,
        )
        self._drafting = None
        if config.speculation is not None:
            self._drafting = Drafting(self.roster, config.speculation, config.max_step_tokens)
        self._batching = Batching(self.roster, config, self._drafting, twice_at)
        self._commit = Commit(self.roster, config.block_size, self._drafting)
        self._ranks: Iterator[int] = count()
        self._open: StepPlan | None = None
        self._cancels: list[tuple[str, int | None]] = []

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self.roster.requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.roster.requests

    def add(self, generate: Generate, now: int = 0) -> list[Sequence]:
        """Take a request: its ``n`` sequences, in line, or all with ``finish="error"`` when it can never run.

        The further beams of a search are in line too, but nothing is ever told of them.

        Raises ValueError for an id that is unfinished here already.
        """
        if generate.id in self.roster.requests:
            raise ValueError(f"id: {generate.id!r} is running already; request ids must be unique")
        refusal = self.limits.refusal(generate)
        if generate.beams is not None and not self.config.kv_cache_reuse:
            refusal = "bad_request"  # beams are lines of blocks
        if self.tiers is not None and self.tiers.disk is not None and generate.cache_until:
            self.tiers.disk.keep_until(generate.scope, generate.cache_until)
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
        return [sequence for sequence in sequences if not sequence.silent]

    def cancel(self, request_id: str, now: int = 0, index: int | None = None) -> list[SequenceOutput]:
        """End all sequences of a request, or one choice; their last outputs. Unknown ones: none.

        Between plan and commit it waits for the commit, which returns the outputs: a device may be writing the blocks.
        A choice on whose prompt others ride ends by the commit that lets these go. One answer of a beam search cannot
        be cancelled.
        """
        if self._open is not None:
            self._cancels.append((request_id, index))
            return []
        if index is not None and any(
            one.index == index and one.siblings and one.search is None
            for one in self.roster.requests.get(request_id, ())
        ):
            if (request_id, index) not in self._cancels:
                self._cancels.append((request_id, index))
            return []
        return self._end(request_id, "cancelled", now, None, index)

    def refuse(self, request_id: str, error: str, now: int = 0) -> list[SequenceOutput]:
        """End all sequences of a request with an error; their last outputs. RuntimeError while a plan is open."""
        if self._open is not None:
            raise RuntimeError("refuse: commit or fail the open plan first")
        return self._end(request_id, "error", now, error)

    def _end(
        self, request_id: str, finish: FinishReason, now: int, error: str | None, index: int | None = None
    ) -> list[SequenceOutput]:
        known = self.roster.requests.get(request_id, ())
        ended = [one for one in known if index is None or (one.index == index and one.search is None)]
        if self._cancels and index is None:
            self._cancels = [waiting for waiting in self._cancels if waiting[0] != request_id]
        for sequence in ended:
            self.roster.end(sequence, finish, now, error)
        self.roster.sweep()
        return [last_output(sequence, [], []) for sequence in ended if not sequence.silent]

    def plan(self, now: int = 0) -> StepPlan | None:
        """What to compute next; None when there is nothing. Raises RuntimeError while a plan is open."""
        if self._open is not None:
            raise RuntimeError("plan: the last plan was neither committed nor failed")
        if self.tiers is not None:
            self.tiers.look_ahead(self.pool, self.roster.waiting, now)
        plan = StepPlan(self.step + 1, started_ns=now)
        if not self._batching.fill(plan, now):
            return None
        self.step = plan.step
        self._open = plan
        return plan

    @property
    def steady(self) -> bool:
        """Between steps, with no cancel on its way, and every running sequence gets a token in every step."""
        if self._drafting is not None:
            return False
        return self._open is None and not self._cancels and self._batching.in_turn and not self._commit.dry

    def passed(self, head: Sequence, first: int, last: int, available: int) -> None:
        """Steps were made without planning, while ``head`` waited for blocks (``Batching.passed``)."""
        self._batching.passed(head, first, last, available)

    def publish(self, sequence: Sequence, full: int) -> None:
        """Register the first ``full`` blocks of a running sequence, all computed (``commit`` does it by itself)."""
        self._commit._publish(sequence, full)

    def commit(self, plan: StepPlan, result: StepResult, now: int = 0) -> list[SequenceOutput]:
        """Book what the runner computed; what is new about each sequence.

        Raises ValueError, before anything is changed, when the result does not fit the plan: then call ``fail``.
        """
        self._expect(plan)
        outputs = self._commit.apply(plan, result, now)
        self._open = None
        if self.tiers is not None:
            self.tiers.settle(True)
        self.roster.sweep()
        return self._cancelled(outputs, now)

    def fail(self, plan: StepPlan, ids: Collection[str], error: str, now: int = 0) -> list[SequenceOutput]:
        """Instead of ``commit``: the runner raised. The requests ``ids`` end with ``error``, the rest is planned again.

        Whether the plan's copies and restores were made is unknown, so sequences that depend on one are computed again.
        """
        self._expect(plan)
        self._open = None
        if self.tiers is not None:
            self.tiers.settle(False)
        outputs: list[SequenceOutput] = []
        for request_id in dict.fromkeys(ids):
            outputs.extend(self._end(request_id, "error", now, error))
        copied = {target for _, target in (*plan.copies, *plan.restores)}
        if copied:
            for sequence in self.roster.running:
                if not copied.isdisjoint(sequence.held()):
                    self.roster.preempt(sequence, now, "runner_error")
            self.roster.sweep()
        return self._cancelled(outputs, now)

    def _expect(self, plan: StepPlan) -> None:
        if plan is not self._open:
            raise RuntimeError(f"step {plan.step} is not the open plan")

    def _cancelled(self, outputs: list[SequenceOutput], now: int) -> list[SequenceOutput]:
        if self._cancels:
            cancels, self._cancels = self._cancels, []
            for request_id, index in cancels:
                outputs.extend(self.cancel(request_id, now, index))
        return outputs

    def purge(
        self, scopes: Collection[bytes], labels: Collection[bytes] = (), keys: Collection[bytes] = ()
    ) -> PurgeTicket:
        """Make these blocks unreachable (``BlockPool.purge``); whoever runs on one publishes nothing more.

        Zero those of ``take_dirty`` afterwards; the ticket counts the rest. Raises RuntimeError while a plan is open.
        """
        if self._open is not None:
            raise RuntimeError("purge: commit the open plan first")
        blocks, pending = self.pool.purge(scopes, labels, keys)
        ticket = PurgeTicket(blocks, len(pending))
        for sequences in self.roster.requests.values():
            for sequence in sequences:
                named = (sequence.scope and sequence.scope in scopes) or not sequence.labels.isdisjoint(labels)
                if named or not pending.isdisjoint(sequence.held()):
                    sequence.purged = True
                    sequence.chain = None
                    if self.tiers is not None:
                        self.tiers.drop_swap(sequence)
                    if sequence.blocks:
                        ticket.users.update((sequence, *sequence.siblings))
        if ticket.users:
            self.roster.purges.open(ticket)
        if self.tiers is not None:
            ticket.below = self.tiers.purge(scopes, labels, keys)
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
            max_running=roster.slots.limit,
            cached_by_tenant=self._owners(),
            drafts_accepted=0 if self._drafting is None else self._drafting.accepted,
            drafts_rejected=0 if self._drafting is None else self._drafting.rejected,
            tiers={} if self.tiers is None else dict(self.tiers.stats()),
            windows=self._windows() if self.limits.tables.slide else {},
        )

    def _windows(self) -> dict[str, tuple[int, int]]:
        """By window (``all``: none): blocks that running sequences hold, and those outside, given back already."""
        found: dict[str, tuple[int, int]] = {}
        for number, window in enumerate(self.limits.tables.windows):
            held = outside = 0
            for sequence in self.roster.running:
                table = sequence.others[number - 1] if number else sequence.blocks
                held += len(table) - sequence.slid[number]
                outside += sequence.slid[number]
            name = str(window or "all")
            before = found.get(name, (0, 0))
            found[name] = (before[0] + held, before[1] + outside)
        return found

    def _owners(self) -> dict[str, int]:
        """Counted anew every ``OWNERS_EVERY`` steps, and whenever nothing runs: a step must not pay for its readers."""
        if not self.roster.running or not 0 <= self.step - self._owners_at < OWNERS_EVERY:
            self._owners_at = self.step
            self._owners_then = self.pool.cached_by_owner(OWNERS)
        return self._owners_then

    def check(self, lent: Iterable[int] = ()) -> None:
        """Assert every invariant; only between steps. ``lent``: blocks of leases (``leases.py``). O(everything)."""
        assert self._open is None
        self.roster.check(lent)
