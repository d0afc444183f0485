"""Host slots: what goes down comes up, in the order in which a plan needs it."""

from __future__ import annotations

import pytest
import torch

from tests.workers.model.test_saved_blocks import _make
from workers.engine.plan import StepPlan
from workers.model.host_tier import HostTier, prepare


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_plan_saves_zeroes_restores_and_copies_in_this_order(kind: str) -> None:
    """A block is saved, zeroed and given another's bytes in one plan; another is copied from what was restored."""
    cache, axis = _make(kind, torch.bfloat16)
    before = cache.data.view(torch.uint8).clone()
    host = HostTier(4 * cache.block_bytes, cache.block_bytes)
    prepare(StepPlan(1, saves=[(1, 0), (2, 3)]), cache, host)
    prepare(StepPlan(2, saves=[(3, 1)], zero=[3, 4], restores=[(3, 3)], copies=[(3, 5)]), cache, host)
    prepare(StepPlan(3, restores=[(1, 6)]), cache, host)
    now = cache.data.view(torch.uint8)
    for block, source in ((3, 2), (5, 2), (6, 3)):
        assert torch.equal(now.select(axis, block), before.select(axis, source))
    assert not now.select(axis, 4).any()
    blocks, ns = host.moved()
    assert blocks == 5
    assert ns > 0
    assert host.moved() == (0, 0)


def test_slots_are_read_placed_and_zeroed() -> None:
    cache, _ = _make("native", torch.bfloat16)
    host = HostTier(3 * cache.block_bytes, cache.block_bytes)
    host.save(cache, [(1, 2)])
    taken = host.read(2)
    assert taken == cache.save([1]).numpy().tobytes()
    host.place(0, taken)
    host.zero([2])
    assert not any(host.read(2))
    assert host.read(0) == taken


def test_a_plan_that_moves_blocks_needs_a_tier() -> None:
    cache, _ = _make("native", torch.bfloat16)
    with pytest.raises(ValueError, match="step 7 moves blocks"):
        prepare(StepPlan(7, restores=[(0, 1)]), cache, None)


def test_too_little_memory_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"size=100 holds 1 blocks of 64 bytes .*; at least 2 .* give it 128 bytes"):
        HostTier(100, 64)
    with pytest.raises(ValueError, match="does not fit in host memory; lower it"):
        HostTier(2**60, 64)
