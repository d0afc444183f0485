"""The pool against a plain model of itself."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.engine.block_hash import BlockKey, chain_keys
from workers.engine.block_pool import HOT_PREFIXES, MAX_LABELS, PUBLIC_OWNER, BlockPool

SCOPES = (b"one", b"two", b"three")


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and release lines of blocks; purges and flushes come in between."""

    @initialize(total=st.integers(1, 12), share=st.sampled_from([0.0, 0.3, 1.0]))
    def start(self, total: int, share: float) -> None:
        self.pool = BlockPool(total, share=share)
        self.lines: list[tuple[bytes, list[int]]] = []
        self.content: dict[BlockKey, int] = {}
        self.doomed: set[int] = set()
        self.dirty: set[int] = set()
        self.label: dict[int, bytes] = {}
        self.serial = 0

    @rule(scope=st.sampled_from(SCOPES), count=st.integers(1, 4), weight=st.sampled_from([1.0, 3.0]))
    def take(self, scope: bytes, count: int, weight: float) -> None:
        if self.pool.available < count:
            if not self.pool.available:
                with pytest.raises(IndexError):
                    self.pool.take(scope, scope.decode(), weight)
            return
        before = self.pool.available
        line = [self.pool.take(scope, scope.decode(), weight) for _ in range(count)]
        assert len(set(line)) == count
        assert not any(block in other for _, other in self.lines for block in line)
        assert self.pool.available == before - count
        taken = set(line)
        assert not taken & self.dirty
        self.label.update(dict.fromkeys(line, scope))
        self.content = {key: block for key, block in self.content.items() if block not in taken}
        self.lines.append((scope, line))

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, line = self.lines.pop(data.draw(st.integers(0, len(self.lines) - 1)))
        still = {block for _, other in self.lines for block in other}
        assert self.pool.release(line) == len(set(line) - still)
        self.dirty |= (set(line) - still) & self.doomed

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        scope, line = data.draw(st.sampled_from(self.lines))
        self.pool.acquire(line)
        self.lines.append((scope, list(line)))

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), same=st.booleans())
    def publish(self, data: st.DataObject, same: bool) -> None:
        scope, line = data.draw(st.sampled_from(self.lines))
        block = data.draw(st.sampled_from(line))
        if block in self.content.values():
            return
        self.serial += not same
        key = chain_keys(scope, "r", None, [self.serial], 1)[0]
        fresh = key not in self.content and block not in self.doomed
        assert self.pool.publish(block, key) == fresh
        if fresh:
            self.content[key] = block

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        found = self.pool.lookup([key])
        assert found == [self.content[key]]
        idle = self.pool.idle(found)
        before = self.pool.available
        self.pool.acquire(found)
        assert self.pool.available == before - idle
        self.lines.append((b"", found))

    @rule(scope=st.sampled_from(SCOPES))
    def purge(self, scope: bytes) -> None:
        held = {block for _, line in self.lines for block in line}
        labelled = {block for block, label in self.label.items() if label == scope}
        zero, pending = self.pool.purge([scope])
        assert pending == labelled & held
        assert zero == len(labelled - held - self.dirty)
        self.doomed |= labelled & held
        self.dirty |= labelled - held
        self.content = {key: block for key, block in self.content.items() if block not in labelled}

    @rule()
    def zero(self) -> None:
        zeroed = self.pool.take_dirty()
        assert set(zeroed) == self.dirty
        assert len(zeroed) == len(self.dirty)
        for block in zeroed:
            del self.label[block]
        self.doomed -= self.dirty
        self.dirty = set()

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        held = {block for _, line in self.lines for block in line}
        self.content = {key: block for key, block in self.content.items() if block in held}
        assert self.pool.cached == 0

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check()
        refs = [0] * pool.total
        for _, line in self.lines:
            for block in line:
                refs[block] += 1
        assert pool.ref == refs
        assert pool.free + pool.cached + pool.used == pool.total
        assert pool.used == sum(count > 0 for count in refs) + pool.dirty
        assert pool.dirty == len(self.dirty)
        for key, block in self.content.items():
            assert pool.lookup([key]) == [block]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def fill(pool: BlockPool, name: str, count: int, weight: float = 1.0) -> list[BlockKey]:
    """``count`` cached blocks of tenant ``name``: one released chain."""
    blocks = [pool.take(name.encode(), name, weight) for _ in range(count)]
    keys = chain_keys(name.encode(), "r", None, range(count), 1)
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    return keys


def test_tail_goes_first() -> None:
    """A chain is evicted from its end, so that its beginning can still be hit."""
    pool = BlockPool(4)
    keys = fill(pool, "a", 4)
    for left in (3, 2, 1):
        pool.take(b"b", "b", 1.0)
        assert len(pool.lookup(keys)) == left


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(3, share=0)
    old, mid, new = (fill(pool, name, 1) for name in "abc")
    hit = pool.lookup(old)
    pool.acquire(hit)
    pool.release(hit)
    pool.take(b"z", "z", 1.0)
    assert [len(pool.lookup(keys)) for keys in (old, mid, new)] == [1, 0, 1]


def test_one_block_per_key() -> None:
    """The second computation of a content stays private and becomes free, not cached."""
    pool = BlockPool(2)
    key = chain_keys(b"s", "r", None, [1], 1)[0]
    first, second = pool.take(b"s", "t", 1.0), pool.take(b"s", "t", 1.0)
    assert pool.publish(first, key)
    assert not pool.publish(second, key)
    pool.release([first])
    pool.release([second])
    assert (pool.cached, pool.free) == (1, 1)
    assert pool.lookup([key]) == [first]


def test_flood_evicts_its_own_first() -> None:
    """A flood leaves alone what others hold below their share; without the protection (share 0) it does not."""
    for share, safe in ((1.0, 8), (0.0, 0)):
        pool = BlockPool(32, share=share)
        victim = fill(pool, "victim", 8)
        for wave in range(40):
            line = [pool.take(b"flood%d" % wave, "flood", 1.0) for _ in range(6)]
            for block, key in zip(line, chain_keys(b"flood%d" % wave, "r", None, range(6), 1), strict=True):
                pool.publish(block, key)
            pool.release(line)
            pool.check()
        assert len(pool.lookup(victim)) == safe
        assert (pool.evictions["own"] > 0) == (share > 0)


def test_share_follows_weight() -> None:
    """Tenants who all flood end with cached blocks in proportion to their weights."""
    pool = BlockPool(80)
    weights = {"heavy": 3.0, "light": 1.0}
    for wave in range(200):
        for name, weight in weights.items():
            line = [pool.take(name.encode(), name, weight) for _ in range(4)]
            for block, key in zip(line, chain_keys(b"%d" % wave, name, None, range(4), 1), strict=True):
                pool.publish(block, key)
            pool.release(line)
    assert pool._cached.owned("heavy") in range(55, 66)


def test_over_share_goes_before_below_share() -> None:
    """Who has nothing cached takes from who holds most per weight, not from who is below its share."""
    pool = BlockPool(20)
    small = fill(pool, "small", 4)
    big = fill(pool, "big", 16)
    for _ in range(5):
        pool.take(b"new", "new", 1.0)
    assert len(pool.lookup(small)) == 4
    assert len(pool.lookup(big)) == 11
    assert pool.evictions["over_share"] == 5


def test_own_goes_before_others_below_share() -> None:
    """Nobody is over its share: who needs a block gives up its own cache first, though another's is older."""
    pool = BlockPool(20)
    older = fill(pool, "older", 5)
    own = fill(pool, "own", 5)
    for _ in range(10):
        pool.take(b"busy", "busy", 1.0)
    for left in (4, 3, 2, 1, 0):
        pool.take(b"own", "own", 1.0)
        assert len(pool.lookup(own)) == left
        assert len(pool.lookup(older)) == 5
    pool.take(b"own", "own", 1.0)
    assert len(pool.lookup(older)) == 4
    assert (pool.evictions["own"], pool.evictions["pressure"]) == (5, 1)


def test_running_work_goes_before_cache() -> None:
    """Protection never withholds a block: with nobody over its share the oldest cached block goes."""
    pool = BlockPool(4)
    fill(pool, "a", 2)
    fill(pool, "b", 2)
    assert len({pool.take(b"c", "c", 1.0) for _ in range(4)}) == 4
    with pytest.raises(IndexError):
        pool.take(b"c", "c", 1.0)


def test_public_blocks_are_nobodys_flood() -> None:
    """A public block belongs to no tenant: purging its first user leaves it, and it counts against nobody."""
    pool = BlockPool(4)
    key = chain_keys(b"a", "r", None, [1], 1, public_tokens=1)[0]
    block = pool.take(b"a", "a", 1.0)
    assert pool.publish(block, key, public=True)
    assert pool.purge([b"a"]) == (0, set())
    pool.release([block])
    assert pool._cached.owned(PUBLIC_OWNER) == 1
    assert pool._cached.owned("a") == 0


def test_purge_is_complete() -> None:
    """security 15: nothing of a purged scope can be hit; cached and stale free blocks are zeroed, used ones follow."""
    pool = BlockPool(8)
    keys = fill(pool, "a", 3)
    other = fill(pool, "b", 2)
    busy = pool.take(b"a", "a", 1.0)
    busy_key = chain_keys(b"a", "r", None, [77], 1)[0]
    pool.publish(busy, busy_key)
    stale = pool.take(b"a", "a", 1.0)
    pool.release([stale])
    assert pool.purge([b"a"]) == (4, {busy})
    assert pool.lookup(keys) == pool.lookup([busy_key]) == []
    assert len(pool.lookup(other)) == 2
    assert pool.evictions["purge"] == 3
    assert stale in pool.take_dirty()
    assert not pool.publish(busy, busy_key)
    pool.release([busy])
    assert pool.dirty == 1
    assert pool.take_dirty() == [busy]
    pool.check()
    assert (pool.free, pool.cached, pool.used) == (6, 2, 0)


def test_hot_prefixes_are_bounded_and_true() -> None:
    pool = BlockPool(200)
    keys = [fill(pool, f"t{i}", 1)[0] for i in range(HOT_PREFIXES + 10)]
    for key in keys:
        pool.count_query(4, 4, key)
    pool.count_query(4, 0, None)
    assert pool.hot_prefixes() == list(reversed(keys[10:]))
    assert (pool.query_tokens, pool.hit_tokens) == (4 * len(keys) + 4, 4 * len(keys))
    pool.flush()
    assert pool.hot_prefixes() == []


def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="blocks: 0"):
        BlockPool(0)
    pool = BlockPool(2)
    block = pool.take(b"", "", 1.0)
    pool.release([block])
    with pytest.raises(ValueError, match="more often"):
        pool.release([block])


def test_owners_are_forgotten() -> None:
    """Ten thousand tenants that come and go leave nothing behind."""
    pool = BlockPool(8)
    for number in range(10_000):
        fill(pool, f"t{number}", 2)
    assert len(pool._cached._owners) <= 8
    assert len(pool._cached._heap) <= 2 * 8 + 65


ALICE, BOB, DOC = frozenset({b"alice"}), frozenset({b"bob"}), frozenset({b"bob", b"doc"})


def test_a_label_finds_what_its_bearer_computed_and_what_it_hit() -> None:
    """Who asked about a content may have hit another's block instead of computing its own: it is found all the same."""
    pool = BlockPool(8)
    keys = fill(pool, "t", 3)
    blocks = pool.lookup(keys)
    pool.mark(blocks, ALICE)
    pool.acquire(blocks[:2])
    pool.mark(blocks[:2], DOC)
    pool.release(blocks[:2])
    assert pool.purge([], [b"carol"]) == (0, set())
    assert pool.purge([], [b"doc"]) == (2, set())
    assert pool.lookup(keys) == []
    assert sorted(pool.take_dirty()) == sorted(blocks[:2])
    assert pool.purge([], [b"alice"]) == (1, set())
    pool.take_dirty()
    pool.check()
    assert pool.purge([], [b"bob", b"alice", b"doc"]) == (0, set())


def test_labels_of_a_block_do_not_grow_with_the_users_of_a_tenant() -> None:
    """A prompt that everybody begins with: beyond a number of labels any purge by label takes its blocks."""
    pool = BlockPool(8)
    keys = fill(pool, "t", 3)
    other = fill(pool, "u", 2)
    blocks = pool.lookup(keys)
    for number in range(MAX_LABELS + 100):
        pool.mark(blocks, frozenset((b"%d" % number, b"group")))
    assert all(len(pool.holding(block).labels) <= MAX_LABELS for block in blocks)
    pool.mark(blocks, ALICE)
    assert pool.purge([], [b"whoever"]) == (3, set())
    assert pool.lookup(keys) == []
    assert len(pool.lookup(other)) == 2, "others bear what they bore"
    pool.take_dirty()
    pool.check()


def test_a_label_finds_free_blocks_that_still_hold_its_bytes() -> None:
    pool = BlockPool(4)
    block = pool.take(b"t", "t", 1.0)
    pool.mark([block], BOB)
    pool.release([block])
    assert pool.purge([], [b"bob"]) == (1, set())
    assert pool.take_dirty() == [block]


def test_a_block_that_is_taken_anew_bears_nobodys_label() -> None:
    pool = BlockPool(1)
    pool.mark([pool.take(b"t", "t", 1.0)], ALICE)
    pool.release([0])
    assert pool.take(b"t", "t", 1.0) == 0
    assert pool.purge([], [b"alice"]) == (0, set())


def test_public_blocks_bear_no_label_and_go_by_their_key() -> None:
    pool = BlockPool(4)
    [key] = chain_keys(b"a", "r", None, [1], 1, public_tokens=1)
    block = pool.take(b"a", "a", 1.0)
    pool.mark([block], ALICE)
    assert pool.publish(block, key, public=True)
    pool.mark([block], BOB)
    pool.release([block])
    assert pool.purge([b"a"], [b"alice", b"bob"]) == (0, set())
    assert pool.purge([], [], [key]) == (1, set())
    assert pool.lookup([key]) == []
    assert pool.take_dirty() == [block]
    pool.check()
