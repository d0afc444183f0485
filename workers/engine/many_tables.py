"""Admission, growth and release where a sequence has several block tables, or one with a window (``tables.py``).

Rules
- A table with a window has blocks for the rows that come next, not for all that is known: a long prompt never holds
  more than its window and a chunk. So prompts grow too, and may make others give way, or give way themselves.
- All tables grow together or none does; all share and copy together.
- A promise counts the blocks of all tables. What its holder gives back as it goes on is promised to it again, and its
  windowed tables are not published meanwhile: somebody who shared them would keep them from coming back. Windows that
  it hits are held besides; where there is no room for both it hits nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.engine.scoring import reusable
from workers.engine.sequence import Sequence
from workers.engine.tables import DEAD, in_use, named

if TYPE_CHECKING:
    from workers.engine.roster import Roster


class ManyTables:
    """Of one roster. ``patience``: preemptions after which a sequence comes back with a promise."""

    def __init__(self, roster: Roster, patience: int) -> None:
        self._roster, self._patience = roster, patience

    def admit(self, sequence: Sequence, now: int) -> int:
        """``Roster.admit``: tables with a window get blocks for the first rows only."""
        roster = self._roster
        tables = roster.limits.tables
        nothing: list[list[int]] = [[] for _ in tables.windows]
        if sequence.chain is None:
            return self._admit(sequence, nothing, now)
        most = reusable(sequence, tables.block_size)
        sequence.chain.extend(sequence.keys, sequence.tokens, most)
        found = tables.hit(sequence.keys, most, roster.pool.find)
        missing = self._admit(sequence, found, now)
        if missing and found[0] and sequence.preemptions >= self._patience:
            missing = self._admit(sequence, nothing, now)
        return missing

    def _admit(self, sequence: Sequence, found: list[list[int]], now: int) -> int:
        """With the blocks of every table that it ``found`` in the prefix cache."""
        roster = self._roster
        pool, tables = roster.pool, roster.limits.tables
        known = len(sequence.tokens)
        hit, hits = len(found[0]), in_use(found)
        more = [tables.begun(table, hit, known) - hit for table in range(tables.count)]
        need, worst = sum(more), 0
        spare = pool.available - roster.promised - pool.idle(hits)
        if sequence.preemptions >= self._patience:
            beams = sequence.search.width if sequence.search is not None else 1
            kept = sum(len(table) for table, window in zip(found, tables.windows, strict=True) if not window)
            worst = roster.limits.worst_blocks(sequence.prompt_len, sequence.max_tokens, beams) - kept
            if beams == 1 and sequence.siblings:
                worst = min(worst + tables.count, roster.limits.blocks - kept)
            missing = worst - spare
        else:
            missing = need + tables.count * len(roster.running) - spare
        if missing > 0:
            return missing
        pool.acquire(hits)
        for table, count in zip(found, more, strict=True):
            table.extend(
                pool.take(sequence.scope, sequence.tenant_key, sequence.weight, sequence.purged) for _ in range(count)
            )
        pool.mark(in_use(found), sequence.labels)
        if worst:
            roster.promises[sequence] = worst - need
            roster.promised += worst - need
        sequence.others = found[1:]
        sequence.slid = [tables.dead(table, hit * tables.block_size) for table in range(tables.count)]
        cached = hit * tables.block_size
        if not sequence.high_water and not sequence.preemptions and sequence.chain is not None:
            pool.count_query(known, cached, sequence.keys[hit - 1] if hit else None)
        roster.start(sequence, found[0], hit, cached, now)
        return 0

    def cover(self, sequence: Sequence, end: int) -> list[tuple[int, int]] | None:
        """Blocks of its own in every table for its rows up to ``end``, or, for lack of blocks, None and in no table.

        Returns the copies to make: of blocks that others share and it is about to write.
        """
        roster = self._roster
        pool, size = roster.pool, roster.limits.block_size
        ref, first, blocks = pool.ref, sequence.computed // size, -(-end // size)
        tables = sequence.tables()
        shared = [
            (table, index)
            for table in tables
            for index in range(first, min(blocks, len(table)))
            if ref[table[index]] > 1
        ]
        wanted = len(shared) + sum(max(0, blocks - len(table)) for table in tables)
        if not wanted:
            return []
        holder = self._holder(sequence)
        promised = min(roster.promises.get(holder, 0), wanted)
        if wanted - promised > pool.available - roster.promised or wanted > pool.available:
            return None
        if promised:
            roster.promises[holder] -= promised
            roster.promised -= promised
        copies = []
        for table, index in shared:
            fresh = roster.take(sequence)
            copies.append((table[index], fresh))
            pool.release(table[index : index + 1])
            table[index] = fresh
        for table in tables:
            while len(table) < blocks:
                table.append(roster.take(sequence))
        return copies

    def stretch(self, sequence: Sequence, end: int) -> int:
        """Cover rows up to ``end`` too if nobody else needs the blocks for that; up to where they are covered now."""
        roster, size = self._roster, self._roster.limits.block_size
        count = roster.limits.tables.count
        wanted = count * (-(-end // size) - len(sequence.blocks))
        spare = roster.pool.available - roster.promised - count * len(roster.running)
        if wanted > 0 and wanted <= spare:
            self.cover(sequence, end)
        return len(sequence.blocks) * size

    def slide(self, sequence: Sequence) -> None:
        """Give back the blocks before every window of what it may still compute. A promise gets them back."""
        roster = self._roster
        tables, freed = roster.limits.tables, 0
        for number, table in enumerate(sequence.tables()):
            first = sequence.slid[number]
            dead = min(tables.dead(number, sequence.computed - 1), len(table))
            if dead > first:
                gone = table[first:dead]
                table[first:dead] = [DEAD] * (dead - first)
                sequence.slid[number] = dead
                freed += roster.give_back(sequence, gone)
        holder = self._holder(sequence)
        if freed and holder in roster.promises:
            roster.promises[holder] += freed
            roster.promised += freed

    def publish(self, sequence: Sequence, full: int) -> None:
        """Register the blocks that are full now, each table's under names of its own."""
        roster, chain = self._roster, sequence.chain
        assert chain is not None
        promised = self.promised(sequence)
        for number, table in enumerate(sequence.tables()):
            if promised and roster.limits.tables.windows[number]:
                continue
            for index in range(sequence.published, full):
                if table[index] != DEAD:
                    key = named(sequence.keys[index], number)
                    roster.pool.publish(table[index], key, public=chain.is_public(index))
        sequence.published = full

    def promised(self, sequence: Sequence) -> bool:
        """Whether its worst case was promised to it."""
        return self._holder(sequence) in self._roster.promises

    @staticmethod
    def _holder(sequence: Sequence) -> Sequence:
        return sequence if sequence.search is None else sequence.search.lead
