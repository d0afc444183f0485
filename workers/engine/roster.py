"""Every unfinished sequence and what happens to one: admission, growth, preemption, end. The planner decides when.

Rules
- A sequence is in exactly one place: waiting, running, or riding on its lead (an unforked choice in ``lead.siblings``).
- ``running`` is sorted by arrival. It is never changed while it is walked: ``preempt`` and ``end`` only take the blocks
  away and note the departure, ``sweep`` takes the departed out of the list.
- Admission gives a sequence the blocks of all its known tokens at once, so a prompt, once begun, never waits for room;
  only growth by output can run out of blocks.
- The beams of a search come and go together: they are admitted as their lead, which computes the prompt, and when one
  loses its blocks all do, and the search starts over.
- A sequence preempted ``MAX_PREEMPTIONS`` times comes back only when its worst case fits, and that is promised to it:
  others cannot take promised blocks, and it is never a victim again. So every sequence is preempted a bounded number of
  times, and whoever holds a promise always gets on: the engine cannot stand still.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import islice

from workers.engine.block_pool import BlockPool
from workers.engine.many_tables import ManyTables
from workers.engine.purge import PurgeLedger
from workers.engine.record import SequenceRecord
from workers.engine.request import Limits
from workers.engine.scoring import reusable
from workers.engine.sequence import Sequence
from workers.engine.service import ServiceCounters
from workers.engine.slots import Slots
from workers.engine.tables import DEAD
from workers.engine.tiers import Tiers
from workers.engine.waiting import WaitingLine, by_arrival
from workers.protocol import FinishReason

MAX_PREEMPTIONS = 4


class Roster:
    """The sequences of one engine. ``slots`` counts choices, also those not forked yet."""

    def __init__(self, pool: BlockPool, limits: Limits, slots: Slots, tiers: Tiers | None = None) -> None:
        self.pool = pool
        self.tiers = tiers
        self.limits = limits
        self.slots = slots
        self.requests: dict[str, list[Sequence]] = {}
        """Unfinished sequences of each request."""
        self.running: list[Sequence] = []
        self.waiting = WaitingLine()
        self.service = ServiceCounters()
        self.purges = PurgeLedger()
        self.riders = 0
        """Unforked choices of running sequences."""
        self.promised = 0
        """Blocks that only the holders of promises may take."""
        self.preemptions = 0
        self.recomputed = 0
        """Tokens computed again, over all sequences."""
        self.many = None if limits.tables.plain else ManyTables(self, MAX_PREEMPTIONS)
        self.records: list[SequenceRecord] = []
        """Of ended sequences, until somebody fetches them."""
        self.promises: dict[Sequence, int] = {}
        """Blocks that only one sequence, or search, may take, by its (lead's) sequence."""
        self._gone: set[Sequence] = set()

    def enter(self, sequences: list[Sequence]) -> None:
        """A new request: its first sequence waits, the others ride on it unless they are given one by one."""
        known = self.requests.setdefault(sequences[0].id, [])
        known.extend(sequences)
        lead = sequences[0]
        lead.siblings = sequences[1:]
        for sequence in sequences:
            self.service.enter(sequence.tenant_key, sequence.weight)
        self.waiting.append(lead)

    def room(self, sequence: Sequence) -> bool:
        """Whether a slot is free for it and its choices. With nobody running there always is one for it."""
        taken = len(self.running) + self.riders
        return not taken or taken + 1 + len(sequence.siblings) <= self.slots.limit

    def admit(self, sequence: Sequence, now: int) -> int:
        """Give it blocks for all its known tokens, from the prefix cache as far as that hits (at most len - 1 tokens).

        Returns 0 when it runs, else how many blocks must become available first.
        """
        if self.many is not None:
            return self.many.admit(sequence, now)
        pool = self.pool
        size = self.limits.block_size
        known = len(sequence.tokens)
        most = reusable(sequence, size)
        hits: list[int] = []
        if sequence.chain is not None:
            sequence.chain.extend(sequence.keys, sequence.tokens, most)
            hits = pool.lookup(islice(sequence.keys, most))
        below: list[int] = []
        if self.tiers is not None and sequence.chain is not None:
            below = self.tiers.lookup(islice(sequence.keys, len(hits), most))
        need = -(-known // size) - len(hits)
        spare = pool.available - self.promised - pool.idle(hits)
        worst = 0
        if sequence.preemptions >= MAX_PREEMPTIONS:
            beams = sequence.search.width if sequence.search is not None else 1
            worst = self.limits.worst_blocks(sequence.prompt_len, sequence.max_tokens, beams) - len(hits)
            if beams == 1 and sequence.siblings and worst < self.limits.blocks - len(hits):
                worst += 1  # the shared tail is copied once the prompt is computed
            missing = worst - spare
        else:
            # One block for each that runs: who comes must not push out at once who is there.
            missing = need + len(self.running) - spare
        if missing > 0:
            return missing
        pool.acquire(hits)
        if self.tiers is not None:
            self.tiers.hold(below)  # before anything that is evicted now takes their slots
        fresh = [pool.take(sequence.scope, sequence.tenant_key, sequence.weight, sequence.purged) for _ in range(need)]
        hit, cached = len(hits), len(hits) * size
        if self.tiers is not None:
            cached = self.tiers.restore(sequence, below, fresh, hit)
        hits.extend(fresh)
        pool.mark(hits, sequence.labels)
        if worst:
            self.promises[sequence] = worst - need
            self.promised += worst - need
        if not sequence.high_water and not sequence.preemptions and sequence.chain is not None:
            deepest = hit + len(below)
            pool.count_query(known, cached, sequence.keys[deepest - 1] if deepest else None)
        self.start(sequence, hits, hit, cached, now)
        return 0

    def start(self, sequence: Sequence, blocks: list[int], hit: int, cached: int, now: int) -> None:
        """From waiting to running. ``hit`` of its blocks are published, ``cached`` tokens need not be computed."""
        sequence.blocks = blocks
        sequence.computed = cached
        sequence.published = hit
        if cached > sequence.high_water:
            prompt = sequence.prompt_len
            sequence.prompt_cached += min(cached, prompt) - min(sequence.high_water, prompt)
            sequence.high_water = cached
        if not sequence.scheduled_ns:
            sequence.scheduled_ns = now
        if sequence.record is not None:
            restored = cached - hit * self.limits.block_size
            sequence.record.admitted(now, cached, self.pool.available, restored)
        self.waiting.discard(sequence)
        insort(self.running, sequence, key=by_arrival)
        self.riders += len(sequence.siblings)

    def grow(self, sequence: Sequence) -> int:
        """One more block for a running sequence, or -1 when none is left for it."""
        holder = sequence if sequence.search is None else sequence.search.lead
        if holder in self.promises:
            left = self.promises[holder]
            if left:
                self.promises[holder] = left - 1
                self.promised -= 1
                return self.take(sequence)
        if self.pool.available <= self.promised:
            return -1
        return self.take(sequence)

    def take(self, sequence: Sequence) -> int:
        """A block for it, marked with its labels; there must be one."""
        block = self.pool.take(sequence.scope, sequence.tenant_key, sequence.weight, sequence.purged)
        self.pool.mark((block,), sequence.labels)
        return block

    def level(self, sequence: Sequence) -> int:
        """How many available blocks would let a waiting sequence in, if it hits nothing in the prefix cache and was
        not preempted too often (``admit``), and nobody holds a promise."""
        return -(-len(sequence.tokens) // self.limits.block_size) + len(self.running)

    def promise(self, sequence: Sequence) -> int:
        """Blocks that only this sequence may take."""
        return self.promises.get(sequence, 0)

    def victim(self) -> Sequence | None:
        """Who gives way: the youngest sequence of the tenant with most service ÷ weight, if anybody may be asked to."""
        gone = self._gone
        return self.service.victim(
            s for s in reversed(self.running) if s.preemptions < MAX_PREEMPTIONS and s not in gone
        )

    def fork(self, lead: Sequence, child: Sequence) -> None:
        """``child`` starts to run on the lead's computed prompt: same blocks, one more user each."""
        lead.siblings.remove(child)
        self.riders -= 1
        self.pool.acquire(lead.held())
        self._same_tables(child, lead)
        child.keys = list(lead.keys)
        child.published = lead.published
        child.computed = child.high_water = lead.computed
        child.scheduled_ns = lead.scheduled_ns
        if child.record is not None:
            child.record.scheduled_ns = lead.scheduled_ns
        insort(self.running, child, key=by_arrival)

    def group(self, sequence: Sequence) -> list[Sequence]:
        """Everybody who loses its blocks with it, itself included."""
        return [sequence] if sequence.search is None else sequence.search.members

    def take_over(self, beam: Sequence, parent: Sequence) -> None:
        """``beam`` lets its own line go and carries on the parent's: same tokens, same blocks, one more user each."""
        self.pool.acquire(parent.held())
        freed = self._release(beam)
        self._same_tables(beam, parent)
        beam.tokens = list(parent.tokens)
        beam.computed = parent.computed
        assert beam.search is not None
        lead = beam.search.lead
        if lead in self.promises:  # what this line had is needed again by the one that took its place
            self.promises[lead] += freed
            self.promised += freed

    @staticmethod
    def _same_tables(child: Sequence, parent: Sequence) -> None:
        child.blocks = list(parent.blocks)
        if parent.slid:
            child.others = [list(table) for table in parent.others]
            child.slid = list(parent.slid)

    def dismount(self, lead: Sequence) -> None:
        """Choices for which no slot was left at the fork run later on their own; the prompt is not billed again."""
        self.riders -= len(lead.siblings)
        for child in lead.siblings:
            child.high_water = child.prompt_len
            self.waiting.put_back(child)
        lead.siblings = []

    def preempt(
        self, sequence: Sequence, now: int, reason: str = "kv_pressure", copies: Items[tuple[int, int]] = ()
    ) -> None:
        """Take its blocks and put it back in line. ``runner_error`` is nobody's preemption and is not counted.

        ``copies``: those of the open plan.
        """
        pressed = reason == "kv_pressure"
        self.preemptions += pressed
        group = self.group(sequence)
        lead = group[0]
        lead.fetch = None
        if self.tiers is not None and pressed:
            self.tiers.swap_out(lead, copies)
        self.riders -= len(lead.siblings)
        for one in group:
            if one.blocks:
                self._gone.add(one)
            self._withdraw(one, now, reason)
            one.preemptions += pressed
            if one.record is not None:
                one.record.preemptions = one.preemptions
        if lead.search is not None:
            lead.search.restart()
            lead.siblings = group[1:]
        self._redeem(lead)
        self.waiting.put_back(lead)

    def _withdraw(self, sequence: Sequence, now: int, reason: str) -> None:
        """Its blocks go, nothing of it is computed any more; a beam forgets its line too."""
        ran = bool(sequence.blocks)
        freed = self._release(sequence)
        if sequence.record is not None and ran:
            sequence.record.preempted(now, reason, freed)
        sequence.computed = 0
        sequence.published = 0
        if sequence.search is not None:
            del sequence.tokens[sequence.prompt_len :]

    def end(self, sequence: Sequence, finish: FinishReason, now: int, error: str | None = None) -> None:
        """Its last act: blocks back, out of every book. Call ``sweep`` afterwards."""
        sequence.finish = finish
        sequence.error = error
        sequence.finished_ns = now
        living = self.requests[sequence.id]
        living.remove(sequence)
        if not self.waiting.discard(sequence):
            self._gone.add(sequence)
            if sequence.blocks:
                self.riders -= len(sequence.siblings)
            else:
                self._alight(sequence, living)
        self._release(sequence)
        if self.tiers is not None:
            self.tiers.drop_swap(sequence)
        self._redeem(sequence)
        if finish in ("stop", "length"):
            self.slots.ended(len(sequence.tokens))
        self.purges.ended(sequence)
        self.service.leave(sequence.tenant_key)
        if not living:
            del self.requests[sequence.id]
        self.archive(sequence)

    def _alight(self, rider: Sequence, living: list[Sequence]) -> None:
        """An unforked choice leaves its lead, if that goes on."""
        for lead in living:
            if rider in lead.siblings:
                lead.siblings.remove(rider)
                self.riders -= bool(lead.blocks)

    def archive(self, sequence: Sequence) -> None:
        """Keep the record of a sequence that has ended."""
        record = sequence.record
        if record is None:
            return
        record.prompt_cached = sequence.prompt_cached
        record.prompt_computed = sequence.prompt_computed
        record.output_tokens = sequence.output_len
        record.finish = sequence.finish
        record.error = sequence.error
        record.ended(sequence.finished_ns)
        self.records.append(record)

    def _release(self, sequence: Sequence) -> int:
        blocks = sequence.held()
        sequence.blocks = []
        if sequence.slid:
            sequence.others, sequence.slid = [], []
        return self.give_back(sequence, blocks)

    def give_back(self, sequence: Sequence, blocks: list[int]) -> int:
        """One user less for each; how many have none any more."""
        if not sequence.purged:
            return self.pool.release(blocks)
        before = self.pool.dirty
        freed = self.pool.release(blocks)
        self.purges.dirtied(sequence, self.pool.dirty - before)
        return freed

    def _redeem(self, holder: Sequence) -> None:
        """Nothing is promised to it any more."""
        self.promised -= self.promises.pop(holder, 0)

    @property
    def preempted(self) -> bool:
        """Whether anybody left ``running`` since the last sweep."""
        return bool(self._gone)

    def departed(self, sequence: Sequence) -> bool:
        """Whether it left ``running`` since the last sweep."""
        return sequence in self._gone

    def sweep(self) -> None:
        """Take the departed out of ``running``."""
        if self._gone:
            gone = self._gone
            self.running = [s for s in self.running if s not in gone]
            self._gone = set()

    def check(self, lent: Iterable[int] = ()) -> None:
        """Assert that every sequence is in one place and that the pool's reference counts are theirs, and one for each
        block ``lent`` to another worker. O(everything)."""
        assert not self._gone
        assert [s.arrival for s in self.running] == sorted({s.arrival for s in self.running})
        users = [0] * self.pool.total
        for block in lent:
            users[block] += 1
        placed: list[Sequence] = []
        for sequences in self.requests.values():
            for sequence in sequences:
                assert sequence.finish is None
                waits = sequence in self.waiting
                assert not (waits and sequence.blocks)
                if waits or sequence.blocks:
                    placed.extend((sequence, *sequence.siblings))
                assert sequence.computed <= len(sequence.blocks) * self.limits.block_size
                assert 0 <= sequence.computed < len(sequence.tokens) + (sequence.search is not None)
                assert sequence.preemptions <= MAX_PREEMPTIONS
                for block in sequence.held():
                    users[block] += 1
                for table, slid in zip(sequence.tables(), sequence.slid, strict=False):
                    assert table[:slid] == [DEAD] * slid
                    assert DEAD not in table[slid:]
        everybody = [s for sequences in self.requests.values() for s in sequences]
        assert len(placed) == len(set(placed)) == len(everybody)
        assert {s for s in placed if s.blocks} == set(self.running)
        assert users == self.pool.ref
        assert self.riders == sum(len(s.siblings) for s in self.running)
        assert self.promised == sum(self.promises.values()) <= self.pool.available + self.pool.dirty
        self.pool.check()
        if self.tiers is not None:
            self.tiers.check()
