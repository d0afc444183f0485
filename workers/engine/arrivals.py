"""Blocks that another worker computed: into this one's prefix cache, between two steps. Engine thread only.

Rules
- What arrives is cached, not in use: it takes room from nobody that runs, may be evicted again before its request is
  admitted (then that part is computed), and is hit, shared and purged like everything else.
- A block is published once its bytes are there. Dirty blocks are zeroed before, or the next plan would do it after.
- What is evicted to make room is gone: there is no plan in which a lower tier could save it.
- What the other worker computed counts as computed for the request, once, in the outputs of its first choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from workers.engine.block_hash import BlockKey
from workers.engine.block_pool import BlockPool
from workers.engine.leases import BlockMover
from workers.protocol import Generate, SequenceOutput

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrived:
    """To the engine: blocks of the prompt of ``generate``, which has not been submitted yet."""

    generate: Generate
    keys: list[BlockKey]
    """Checked: they are those of the request."""
    data: bytes
    public: int
    """How many of ``keys`` lie in a public prefix."""
    reply: Callable[[bool], None]
    """Whether more may follow. Called on the engine thread."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """To the engine: run ``generate``; of its prompt ``computed`` tokens were computed elsewhere and have arrived."""

    generate: Generate
    computed: int


class Arrivals:
    """Of one engine."""

    def __init__(self, pool: BlockPool, mover: BlockMover, zero: Callable[[list[int]], None]) -> None:
        """``zero``: overwrites blocks with zeros, at once, in every cache that has them."""
        self._pool = pool
        self._mover = mover
        self._zero = zero
        self._computed: dict[str, list[int]] = {}
        """By request: tokens computed elsewhere, choices that have not ended."""

    def place(self, message: Arrived) -> None:
        """Take blocks in, as many as there is room for."""
        try:
            message.reply(self._placed(message))
        except Exception as error:  # the request is computed here instead
            _log.error("blocks that arrived could not be placed (%s)", type(error).__name__)
            message.reply(False)

    def _placed(self, message: Arrived) -> bool:
        pool, generate = self._pool, message.generate
        dirty = pool.take_dirty()
        if dirty:
            self._zero(dirty)
        size = self._mover.block_bytes
        known = [block for key in message.keys for block in pool.lookup((key,))]
        missing = [index for index, key in enumerate(message.keys) if not pool.lookup((key,))]
        pool.acquire(known)  # or making room for the rest could evict them
        try:
            fits = missing[: pool.available]
            pool.vacate(len(fits), generate.tenant_key)
            blocks = [pool.take(generate.scope, generate.tenant_key, generate.weight) for _ in fits]
            try:
                if blocks:
                    data = memoryview(message.data)
                    self._zero(blocks)
                    self._mover.write(blocks, b"".join(data[index * size : (index + 1) * size] for index in fits))
                    pool.mark(blocks, frozenset(generate.labels))
                    for block, index in zip(blocks, fits, strict=True):
                        pool.publish(block, message.keys[index], public=index < message.public)
            finally:
                pool.release(blocks)
        finally:
            pool.release(known)
        return len(fits) == len(missing)

    def note(self, message: HandedOver) -> None:
        """A request is about to run of which a part was computed elsewhere."""
        if message.computed > 0:
            self._computed[message.generate.id] = [message.computed, message.generate.n]

    def told(self, output: SequenceOutput) -> SequenceOutput:
        """An output as the gateway should count it."""
        entry = self._computed.get(output.id)
        if entry is None:
            return output
        elsewhere = entry[0]
        if output.finish is not None:
            entry[1] -= 1
            if not entry[1]:
                del self._computed[output.id]
        if output.index:
            return output
        moved = min(elsewhere, output.prompt_cached)
        return replace(
            output, prompt_cached=output.prompt_cached - moved, prompt_computed=output.prompt_computed + moved
        )
