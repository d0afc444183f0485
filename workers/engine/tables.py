"""Which block tables a sequence has, and which of their blocks it still needs. Integers only.

A model whose layers attend to differently many latest tokens (Gemma 3: five layers with a window, then one without)
keeps them in groups: a table per group, or several where one group has more layers than another, so that all tables'
blocks have one size and come from one pool (hybrid models in one pool of equal pages: Zhang et al. 2025, "Jenga",
arXiv:2503.18292). Every other model has one table and pays nothing for this.

Rules
- Tables without a window come first. ``Sequence.blocks`` is table 0, ``Sequence.others`` are the rest.
- A block is dead once all its positions lie before the window of every row that may still be computed. Its entry is
  ``DEAD`` from then on and the block is given back; ``Sequence.slid`` counts such entries, which lead their table.
- The last computed row may be computed once more (``Commit``), so its window counts.
- A prefix can be gone on from where the tables without a window have all its blocks, the others those of the window.
- Table t > 0 publishes a block under the chain's key and one more byte, t: the chain names tokens, the byte layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.types import kv_blocks
from workers.engine.block_hash import BlockKey

DEAD = -1
KEY_BYTES = 32
"""Of a chain's key; what follows is the table's byte."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Of one model. ``windows``: by table, how many latest tokens its layers attend to; 0 = all."""

    windows: tuple[int, ...] = (0,)
    block_size: int = 16
    rows: int = 1
    """Most rows of one sequence in a step."""

    @property
    def count(self) -> int:
        """Tables of a sequence."""
        return len(self.windows)

    @property
    def slide(self) -> bool:
        """Whether any table has a window."""
        return any(self.windows)

    @property
    def plain(self) -> bool:
        """One table whose blocks all stay."""
        return self.windows == (0,)

    @property
    def keeps(self) -> list[int]:
        """By table, most tokens whose blocks a sequence holds at once, 0 = all; empty for a plain model."""
        return [] if self.plain else [window and window + self.rows for window in self.windows]

    def dead(self, table: int, row: int) -> int:
        """How many leading blocks of a table no row at position ``row`` or later attends to."""
        window = self.windows[table]
        return max(0, row + 1 - window) // self.block_size if window else 0

    def most(self, table: int, tokens: int) -> int:
        """Blocks of a table that a sequence of so many computed tokens ever holds at once."""
        window = self.windows[table]
        return kv_blocks(tokens, self.block_size, (window and window + self.rows,))

    def worst(self, tokens: int) -> int:
        """``most`` over all tables."""
        if self.plain:
            return -(-tokens // self.block_size)
        return sum(self.most(table, tokens) for table in range(self.count))

    def begun(self, table: int, hit: int, known: int) -> int:
        """Blocks that a table has entries for after admission: all that is known, with a window only the first rows."""
        end = min(known, hit * self.block_size + self.rows) if self.windows[table] else known
        return -(-end // self.block_size)

    def hit(self, keys: Sequence[BlockKey], most: int, find: Callable[[BlockKey], int | None]) -> list[list[int]]:
        """Entries of every table for the longest prefix, at most ``most`` blocks, that can be gone on from.

        ``find``: a key's block. O(blocks x tables).
        """

        def block(table: int, index: int) -> int | None:
            return find(named(keys[index], table))

        full = [table for table, window in enumerate(self.windows) if not window]
        for table in full:
            most = next((index for index in range(most) if block(table, index) is None), most)
        windowed = [table for table, window in enumerate(self.windows) if window]
        best = 0 if windowed else most
        if windowed:
            runs = dict.fromkeys(windowed, 0)
            for length in range(1, most + 1):
                for table in windowed:
                    runs[table] = 0 if block(table, length - 1) is None else runs[table] + 1
                row = length * self.block_size
                if all(runs[table] >= length - self.dead(table, row) for table in windowed):
                    best = length
        found: list[list[int]] = []
        for table in range(self.count):
            dead = self.dead(table, best * self.block_size)
            blocks = (block(table, index) for index in range(dead, best))
            found.append([DEAD] * dead + [one for one in blocks if one is not None])
        return found


def named(key: BlockKey, table: int) -> BlockKey:
    """The key under which a table's block is published."""
    return BlockKey(key + bytes([table])) if table else key


def in_use(tables: Sequence[Sequence[int]]) -> list[int]:
    """The blocks of all tables, by place in the line and then by table: released from its end, chains break there."""
    longest = max(map(len, tables))
    return [table[index] for index in range(longest) for table in tables if index < len(table) and table[index] != DEAD]
