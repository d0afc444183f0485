"""Blocks in host memory: what the device evicted, what came from the disk, what preempted sequences left. One thread.

Rules
- A slot holds one block's bytes in its cache's own layout (``save``, ``restore``); which block is the engine's business
  (``engine/tiers.py``). Only the engine thread touches the memory.
- Memory is taken as slots are filled for the first time, and given back with the worker.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.plan import StepPlan

PART_BYTES = 16 * 2**20
"""What is copied at once: moving a long prefix must not need its size again in between."""


class BlockCache(Protocol):
    """A device's keys and values, of either kind."""

    block_bytes: int

    def save(self, blocks: list[int]) -> Tensor:
        """uint8 [len(blocks), block_bytes] in host memory."""
        ...

    def restore(self, blocks: list[int], saved: Tensor) -> None:
        """Put back what ``save`` made."""
        ...

    def zero(self, blocks: list[int]) -> None:
        """Overwrite with zeros."""
        ...

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (source, destination)."""
        ...


class HostTier:
    """``slots`` blocks of ``block_bytes``. Raises ValueError when fewer than two fit, or the memory is not there."""

    def __init__(self, size: int, block_bytes: int) -> None:
        self.slots = size // block_bytes
        self.block_bytes = block_bytes
        if self.slots < 2:
            raise ValueError(
                f"engine.tiers[0].size={size} holds {self.slots} blocks of {block_bytes} bytes in host memory; at "
                f"least 2 are needed, so give it {2 * block_bytes} bytes or more"
            )
        try:
            memory = mmap.mmap(-1, self.slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(f"engine.tiers[0].size={size} does not fit in host memory; lower it") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = memoryview(memory)
        self._rows = torch.frombuffer(memory, dtype=torch.uint8).view(self.slots, block_bytes)
        self._moved = 0
        self._ns = 0

    def save(self, cache: BlockCache, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks out: (block, slot) each."""
        began = time.perf_counter_ns()
        for part in self._parts(pairs):
            self._rows.index_copy_(
                0, torch.tensor([slot for _, slot in part]), cache.save([block for block, _ in part])
            )
        self._took(len(pairs), began)

    def restore(self, cache: BlockCache, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in: (slot, block) each."""
        began = time.perf_counter_ns()
        for part in self._parts(pairs):
            rows = self._rows.index_select(0, torch.tensor([slot for slot, _ in part]))
            cache.restore([block for _, block in part], rows)
        self._took(len(pairs), began)

    def read(self, slot: int) -> bytes:
        """A copy of a slot's bytes."""
        start = slot * self.block_bytes
        return bytes(self._bytes[start : start + self.block_bytes])

    def place(self, slot: int, data: bytes | memoryview) -> None:
        """Fill a slot with what ``read`` gave."""
        start = slot * self.block_bytes
        self._bytes[start : start + self.block_bytes] = data

    def zero(self, slots: list[int]) -> None:
        """Overwrite slots with zeros."""
        if slots:
            self._rows[torch.tensor(slots)] = 0

    def moved(self) -> tuple[int, int]:
        """(blocks, ns) of saves and restores since the last call."""
        told = self._moved, self._ns
        self._moved = self._ns = 0
        return told

    def _parts(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        step = max(1, PART_BYTES // self.block_bytes)
        for start in range(0, len(pairs), step):
            yield pairs[start : start + step]

    def _took(self, blocks: int, began: int) -> None:
        if blocks:
            self._moved += blocks
            self._ns += time.perf_counter_ns() - began


def prepare(plan: StepPlan, cache: BlockCache, host: HostTier | None) -> None:
    """Everything that happens to whole blocks before a forward pass, in the one order that is right: what is
    overwritten is saved first, what is zeroed is restored or copied into afterwards.

    Raises ValueError for a plan that moves blocks where there is no tier.
    """
    if host is not None:
        host.save(cache, plan.saves)
    elif plan.saves or plan.restores:
        raise ValueError(f"step {plan.step} moves blocks, and there is no tier to move them to")
    cache.zero(plan.zero)
    if host is not None:
        host.restore(cache, plan.restores)
    cache.copy(plan.copies)
