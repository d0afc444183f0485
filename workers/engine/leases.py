"""Blocks that a prefill worker holds for whoever fetches them. Engine thread only; integers and keys, bytes pass by.

Rules
- A request that names a ticket (``Generate.lend``) is watched to its end. What the prefix cache then has of its prompt
  is leased: one more user for each block, in the same turn in which the request gave them up, so nobody came between.
- A lease ends when it is given back, when its time is over, or when a purge concerns it; its blocks are cached again.
- At most half of the pool is leased, so that prompts always have room to run. Beyond that there is no offer.
- Every ticket is told of once: an offer, or that there is none. Later only that an offer has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from workers.engine.block_hash import BlockKey, chain_keys
from workers.engine.block_pool import BlockPool, concerned
from workers.protocol import Generate, Purge, SequenceOutput


class BlockMover(Protocol):
    """Bytes of whole blocks, out of a cache and into it."""

    block_bytes: int

    def read(self, blocks: list[int]) -> bytes:
        """A copy of the blocks, one after the other."""
        ...

    def write(self, blocks: list[int], data: bytes) -> None:
        """Put back what ``read`` of a cache of the same layout gave. Raises ValueError for another length."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """What is held under a ticket."""

    keys: tuple[BlockKey, ...]
    computed: int
    """Tokens of these blocks that were computed for it, not found in the cache."""


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """To the engine: blocks ``[first, first + count)`` of a lease, please."""

    ticket: str
    first: int
    count: int
    reply: Callable[[bytes | None], None]
    """None: the lease has ended. Called on the engine thread."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """To the engine: the reader is done."""

    ticket: str


@dataclass(slots=True)
class _Lease:
    generate: Generate
    keys: tuple[BlockKey, ...]
    blocks: list[int]
    until_ns: int


class Leases:
    """Of one engine."""

    def __init__(
        self,
        pool: BlockPool,
        mover: BlockMover,
        *,
        block_size: int,
        revision: str,
        lease_ns: int,
        on_offer: Callable[[str, Offer | None], None],
    ) -> None:
        """``on_offer(ticket, offer)``: there is one, there is none, or it has ended (None)."""
        self._pool = pool
        self._mover = mover
        self._size = block_size
        self._revision = revision
        self._lease_ns = lease_ns
        self._on_offer = on_offer
        self._expected: dict[str, Generate] = {}
        self._leases: dict[str, _Lease] = {}
        """By ticket."""
        self._leased = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def blocks(self) -> int:
        """How many blocks are leased; one under two tickets counts twice."""
        return self._leased

    def expect(self, generate: Generate) -> None:
        """A request came that may name a ticket."""
        if generate.lend:
            self._expected[generate.id] = generate

    def ended(self, output: SequenceOutput, now: int) -> None:
        """News of any request, before the next plan is made."""
        if output.finish is None or output.index or output.id not in self._expected:
            return
        generate = self._expected.pop(output.id)
        ticket, found = generate.lend, self._found(generate) if output.finish in ("stop", "length") else []
        if not found or ticket in self._leases or self._leased + len(found) > self._pool.total // 2:
            self._on_offer(ticket, None)
            return
        blocks = [block for _, block in found]
        keys = tuple(key for key, _ in found)
        self._pool.acquire(blocks)
        self._leased += len(blocks)
        self._leases[ticket] = _Lease(generate, keys, blocks, now + self._lease_ns)
        behind = len(generate.tokens) - len(blocks) * self._size
        self._on_offer(ticket, Offer(keys, max(0, output.prompt_computed - behind)))

    def _found(self, generate: Generate) -> list[tuple[BlockKey, int]]:
        """Keys and blocks of the prompt's beginning, as far as it is cached."""
        keys = chain_keys(
            generate.scope,
            self._revision,
            generate.adapter,
            generate.tokens,
            self._size,
            public_tokens=generate.public_prefix_tokens,
        )
        return list(zip(keys, self._pool.lookup(keys), strict=False))

    def handle(self, message: ReadBlocks | GiveBack) -> None:
        """Serve a reader."""
        if isinstance(message, GiveBack):
            if message.ticket in self._leases:
                self._end(message.ticket)
            return
        lease = self._leases.get(message.ticket)
        blocks = lease.blocks[message.first : message.first + message.count] if lease is not None else []
        message.reply(self._mover.read(blocks) if blocks else None)

    def purge(self, purge: Purge) -> None:
        """Before a purge: what it concerns is leased no longer, so that it is zeroed with everything else."""
        for ticket, lease in list(self._leases.items()):
            if concerns(purge, lease.generate, lease.keys) or self._bears(lease.blocks, purge):
                self._end(ticket)

    def _bears(self, blocks: list[int], purge: Purge) -> bool:
        """Whether a block has a label that is purged, of somebody else who hit it."""
        about = concerned(frozenset(), frozenset(purge.labels))
        return any(about(b"", self._pool.holding(block).labels) for block in blocks)

    def sweep(self, now: int) -> None:
        """End what nobody fetched in time."""
        for ticket in [ticket for ticket, lease in self._leases.items() if lease.until_ns <= now]:
            self._end(ticket)

    def _end(self, ticket: str) -> None:
        lease = self._leases.pop(ticket)
        self._leased -= len(lease.blocks)
        self._pool.release(lease.blocks)
        self._on_offer(ticket, None)


def concerns(purge: Purge, generate: Generate, keys: Collection[bytes]) -> bool:
    """Whether a purge is about a request's blocks: by its scope, its labels, or by one of their keys."""
    return (
        (bool(generate.scope) and generate.scope in purge.scopes)
        or not set(generate.labels).isdisjoint(purge.labels)
        or not set(purge.keys).isdisjoint(keys)
    )
