"""Blocks from another worker, put into the prefix cache between two steps."""

from __future__ import annotations

from tests.workers.engine.drive import request
from tests.workers.transfer.pair import BLOCK_BYTES, FakeMover
from workers.engine.arrivals import Arrivals, Arrived, HandedOver
from workers.engine.block_hash import BlockKey, chain_keys
from workers.engine.block_pool import BlockPool
from workers.engine.testing import FakeRunner, Slot
from workers.protocol import SequenceOutput

PROMPT = list(range(50, 62))
GENERATE = request("r", PROMPT, labels=[b"user"])
KEYS = chain_keys(b"scope", "rev", None, PROMPT, 4)


class Rig:
    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.runner = FakeRunner(blocks, 4)
        self.zeroed: list[int] = []
        self.arrivals = Arrivals(self.pool, FakeMover(self.runner), self._zero)
        self.answers: list[bool] = []

    def _zero(self, blocks: list[int]) -> None:
        self.zeroed += blocks
        self.runner.zero_blocks(blocks)

    def place(self, keys: list[BlockKey], data: bytes | None = None, public: int = 0) -> None:
        if data is None:
            source = FakeRunner(len(keys), 4)
            for place, key in enumerate(keys):
                index = KEYS.index(key)
                source.slots[place] = [Slot(PROMPT[at], at, b"scope", None) for at in range(index * 4, index * 4 + 4)]
            data = FakeMover(source).read(list(range(len(keys))))
        self.arrivals.place(Arrived(GENERATE, keys, data, public, self.answers.append))
        self.pool.check()


def test_what_arrives_is_cached_and_in_nobodys_way() -> None:
    rig = Rig(8)
    rig.place(KEYS)
    assert rig.answers == [True]
    assert rig.pool.cached == 3
    assert rig.pool.available == 8
    blocks = rig.pool.lookup(KEYS)
    assert [slot.token for block in blocks for slot in rig.runner.slots[block] if slot] == PROMPT
    assert rig.pool.purge([], [b"user"])[0] == 3, "a purge by label finds it"


def test_blocks_that_are_there_stay_and_the_rest_is_added() -> None:
    rig = Rig(4)
    rig.place(KEYS[:1])
    first = rig.pool.lookup(KEYS[:1])
    rig.pool.take(b"other", "other", 1.0)  # leaves room for two
    rig.place(KEYS)
    assert rig.answers == [True, True]
    assert rig.pool.lookup(KEYS)[:1] == first
    assert rig.pool.cached == 3


def test_without_room_as_much_as_fits_is_taken() -> None:
    rig = Rig(4)
    for _ in range(2):
        rig.pool.take(b"other", "other", 1.0)
    rig.place(KEYS)
    assert rig.answers == [False]
    assert len(rig.pool.lookup(KEYS)) == 2


def test_room_is_made_before_and_not_by_taking_blocks() -> None:
    """What a plan evicts, its saves may still read; here there is no plan."""
    rig = Rig(4)
    for number in range(4):
        block = rig.pool.take(b"other", "other", 1.0)
        rig.pool.publish(block, BlockKey(bytes([number]) * 32))
        rig.pool.release([block])
    free: list[int] = []
    take = rig.pool.take
    rig.pool.take = lambda *about: free.append(rig.pool.free) or take(*about)  # type: ignore[method-assign, func-returns-value]
    rig.place(KEYS)
    assert free == [3, 2, 1]
    assert sum(rig.pool.evictions.values()) == 3
    assert len(rig.pool.lookup(KEYS)) == 3


def test_purged_blocks_are_zeroed_before_they_are_written() -> None:
    """The next plan would zero them after."""
    rig = Rig(3)
    rig.place(KEYS)
    rig.pool.purge([b"scope"])
    assert rig.pool.dirty == 3
    rig.place(KEYS)
    assert rig.pool.dirty == 0
    assert rig.pool.take_dirty() == []
    assert len(rig.pool.lookup(KEYS)) == 3
    assert rig.zeroed[:3] != []


def test_bytes_that_cannot_be_written_are_published_under_no_key() -> None:
    rig = Rig(4)
    rig.place(KEYS, b"x" * BLOCK_BYTES)
    assert rig.answers == [False]
    assert rig.pool.lookup(KEYS) == []
    assert rig.pool.free == 4


def test_blocks_inside_a_public_prefix_belong_to_nobody() -> None:
    rig = Rig(4)
    rig.place(KEYS, public=2)
    assert rig.pool.purge([b"scope"])[0] == 1
    assert len(rig.pool.lookup(KEYS)) == 2


def test_what_was_computed_elsewhere_is_counted_once_and_never_beyond_the_hit() -> None:
    rig = Rig(4)
    rig.arrivals.note(HandedOver(request("r", PROMPT, n=2), 8))
    tell = rig.arrivals.told
    first = tell(SequenceOutput("r", 0, prompt_computed=4, prompt_cached=8))
    assert (first.prompt_computed, first.prompt_cached) == (12, 0)
    lost = tell(SequenceOutput("r", 0, prompt_computed=8, prompt_cached=4))
    assert (lost.prompt_computed, lost.prompt_cached) == (12, 0), "half of it was evicted before it was hit"
    assert tell(SequenceOutput("r", 1, finish="length")).prompt_computed == 0
    assert tell(SequenceOutput("r", 0, prompt_computed=4, prompt_cached=8, finish="length")).prompt_computed == 12
    after = tell(SequenceOutput("r", 0, prompt_computed=4, prompt_cached=8))
    assert after.prompt_computed == 4, "it is forgotten with its last choice"
