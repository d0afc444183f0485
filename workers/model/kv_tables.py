"""Which layers share a block: how a model's layers are laid over its block tables (``engine/tables.py``).

Layers with the same window form a group. One group: one table, a block holds all layers. Several: every table has
``depth`` layers, so that blocks of all tables are equally large; a group with more has several tables. ``depth`` is
chosen for few tables and few bytes for layers that are not there. Gemma 3 270M: 15 layers with a window and 3 without
make 5 + 1 tables of 3 layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.sequence import Sequence
from workers.model.config import ModelConfig

WASTE, WINDOWED_WASTE = 0.1, 0.2
"""Most that places without a layer may add to a group: where there is no window they cost the whole context."""


@dataclass(frozen=True, slots=True)
class KvTables:
    """Of one model."""

    depth: int
    """Layers in a block."""
    windows: tuple[int, ...]
    """By table; 0 = attends to all. Those without a window first."""
    places: tuple[tuple[int, int], ...]
    """By layer: its table, and its place in that table's blocks."""

    @property
    def count(self) -> int:
        """Tables of a sequence."""
        return len(self.windows)

    def window(self, layer: int) -> int:
        """A layer's window; 0 = attends to all."""
        return self.windows[self.places[layer][0]]

    def reach(self, blocks: int, block_size: int, max_context: int) -> int:
        """Positions that a sequence can have in a cache of so many blocks: rotations are laid out no further, which for
        a context of a million tokens would take half a gigabyte."""
        return max_context if all(self.windows) else min(max_context, blocks * block_size)

    def put(self, sequence: Sequence, blocks: list[int]) -> list[int]:
        """Place a sequence by hand: ``blocks`` in its first table, the like further up in the others. Returns all."""
        stride = max(blocks, default=-1) + 1
        sequence.blocks = blocks
        sequence.others = [[block + table * stride for block in blocks] for table in range(1, self.count)]
        sequence.slid = [] if self.windows == (0,) else [0] * self.count
        return [block for table in sequence.tables() for block in table]


def one_table(layers: int) -> KvTables:
    """All layers in one table that keeps all blocks."""
    return KvTables(layers, (0,), tuple((0, layer) for layer in range(layers)))


def tables_of(config: ModelConfig, max_context: int) -> KvTables:
    """A model's tables. A window that no context exceeds is none."""
    effective = [window if 0 < (window := config.window(layer)) < max_context else 0 for layer in range(config.layers)]
    groups = {window: [layer for layer in range(config.layers) if effective[layer] == window] for window in effective}
    depth = _depth({window: len(layers) for window, layers in groups.items()})
    windows: list[int] = []
    places = [(0, 0)] * config.layers
    for window in sorted(groups):
        for number, layer in enumerate(groups[window]):
            places[layer] = (len(windows) + number // depth, number % depth)
        windows += [window] * -(-len(groups[window]) // depth)
    return KvTables(depth, tuple(windows), tuple(places))


def _depth(sizes: dict[int, int]) -> int:
    """From each group's layers, by window: of all depths that waste little, the smallest with fewest tables."""

    def fits(depth: int) -> bool:
        limits = {window: WINDOWED_WASTE if window else WASTE for window in sizes}
        return all(-(-size // depth) * depth <= (1 + limits[window]) * size for window, size in sizes.items())

    fitting = filter(fits, range(1, max(sizes.values()) + 1))
    return min(fitting, key=lambda depth: sum(-(-size // depth) for size in sizes.values()))
