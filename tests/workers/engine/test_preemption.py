"""Out of blocks: who gives way, how often, and that everybody gets on."""

from __future__ import annotations

import pytest

from tests.workers.engine.drive import Drive, request
from workers.engine.roster import MAX_PREEMPTIONS


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", [1, 4])
def test_no_cycle(prefix_cache: bool, block_size: int) -> None:
    """engine D3: a pool of 1.3 x one request's final length and four of them: all finish, few preemptions each."""
    drive = Drive(blocks=156 // block_size, block_size=block_size, prefix_cache=prefix_cache, max_step_tokens=512)
    sequences = [drive.add(request(f"q{i}", 20, 100))[0] for i in range(4)]
    drive.run()
    assert drive.planner.roster.preemptions > 0
    assert max(s.preemptions for s in sequences) <= MAX_PREEMPTIONS
    assert all(last.finish == "length" for last in drive.last.values())


def test_order_of_finishing_is_order_of_arrival() -> None:
    """engine D5: equal requests under pressure end in the order in which they came; none is computed over and over."""
    drive = Drive(blocks=40, block_size=4, max_step_tokens=256)
    drive.add(*(request(f"q{i}", 20, 40) for i in range(8)))
    drive.run()
    assert drive.planner.roster.preemptions > 0
    assert [name for name, _ in drive.order] == [f"q{i}" for i in range(8)]
    assert drive.planner.roster.recomputed < 8 * 60


def preempted_first(drive: Drive) -> str:
    while not drive.planner.roster.preemptions:
        assert drive.step() is not None
    (victim,) = (s.id for line in drive.planner.roster.requests.values() for s in line if s.preemptions)
    return victim


def test_victim_is_the_youngest() -> None:
    """One tenant: who came last gives way."""
    drive = Drive(blocks=9, block_size=4)
    drive.add(*(request(f"q{i}", 8, 20) for i in range(3)))
    assert preempted_first(drive) == "q2"
    drive.run()


def test_victim_is_of_the_tenant_with_most_service() -> None:
    """The tenant that got most gives way, though its request came before the other's; weights scale what is much."""
    for weight, victim in ((1.0, "big1"), (100.0, "small")):
        drive = Drive(blocks=18, block_size=4, max_step_tokens=256)
        drive.add(request("warm", 40, 20, tenant_key="big", weight=weight))
        drive.run()
        drive.planner.pool.flush()
        drive.add(
            request("big0", 16, 30, tenant_key="big", weight=weight),
            request("big1", 16, 30, tenant_key="big", weight=weight),
            request("small", 14, 30, tenant_key="small"),
        )
        assert preempted_first(drive) == victim
        drive.run()


def test_absence_is_no_credit() -> None:
    """A tenant that comes back is lifted to the others' level: what it did not use then is not owed to it now."""
    drive = Drive(blocks=400)
    service = drive.planner.roster.service
    drive.add(request("a", 40, 60, tenant_key="steady", weight=2.0))
    for _ in range(30):
        drive.step()
    level = service.ratio("steady")
    assert level > 20
    drive.add(request("b", 4, 4, tenant_key="back", weight=1.0))
    assert service.ratio("back") == level
    drive.run()


def test_recompute_is_not_billed() -> None:
    """Preempted in the middle of its output, a request reports its prompt once; what ran again is counted apart."""
    drive = Drive(blocks=12, block_size=4, prefix_cache=False, max_step_tokens=16)
    drive.add(*(request(f"q{i}", 10, 20) for i in range(3)))
    drive.run()
    roster = drive.planner.roster
    assert roster.preemptions > 0
    assert roster.recomputed > 0
    assert all(last.prompt_computed == 10 for last in drive.last.values())
    assert all(last.output_tokens == 20 for last in drive.last.values())
    assert drive.runner.rows == 3 * 29 + roster.recomputed


def test_prefix_is_hit_again_after_preemption() -> None:
    """Back in line, a request takes what is left of its own blocks from the cache: less is computed again."""
    rows = {}
    for prefix_cache in (True, False):
        drive = Drive(blocks=14, block_size=4, prefix_cache=prefix_cache)
        drive.add(request("old", 8, 30), request("young", 24, 30))
        drive.run()
        assert drive.planner.roster.preemptions > 0
        rows[prefix_cache] = drive.planner.roster.recomputed
    assert rows[True] < rows[False]


def test_the_last_preemption_comes_with_a_promise() -> None:
    """A sequence preempted as often as allowed returns only with its worst case promised, and is never asked again."""
    drive = Drive(blocks=16, block_size=2, prefix_cache=False, max_step_tokens=64)
    hunted = drive.add(request("hunted", 4, 22, tenant_key="greedy"))[0]
    drive.planner.roster.service.add("greedy", 10_000)
    for number in range(60):
        drive.add(request(f"q{number}", 4, 8, tenant_key=f"t{number}"))
    promised = False
    while drive.step() is not None:
        drive.planner.roster.service._present.get("greedy") and drive.planner.roster.service.add("greedy", 10_000)
        if hunted.preemptions == MAX_PREEMPTIONS and hunted.blocks:
            promised = promised or drive.planner.roster.promised > 0
    drive.idle()
    assert hunted.finish == "length"
    assert hunted.preemptions == MAX_PREEMPTIONS
    assert promised


def test_choices_under_pressure() -> None:
    """engine C1: choices that share blocks are preempted and computed again with the right tokens."""
    drive = Drive(blocks=11, block_size=2, max_step_tokens=64)
    drive.add(request("a", 7, 12, n=3), request("b", 5, 12, n=2))
    drive.run()
    assert drive.planner.roster.preemptions > 0
    assert drive.runner.copies > 0


def test_a_victim_leaves_nothing_in_the_plan() -> None:
    """The chunk and the copies of a sequence that is preempted while its own step is planned go with it."""
    drive = Drive(blocks=6, block_size=2, max_step_tokens=64, prefix_cache=False)
    drive.add(request("a", 3, 8, tenant_key="a"), request("b", 3, 8, n=2, tenant_key="b"))
    while (plan := drive.step()) is not None:
        for chunk in plan.chunks:
            assert chunk.sequence.finish is not None or chunk.sequence.blocks
    drive.idle()
    assert drive.planner.roster.preemptions > 0


def test_who_holds_a_promise_is_no_victim() -> None:
    """Though its tenant got by far the most: the others make room for one another, and it gets its blocks in time."""
    drive = Drive(blocks=24, block_size=2, prefix_cache=False, max_step_tokens=64)
    hunted = drive.add(request("hunted", 4, 22, tenant_key="greedy"))[0]
    hunted.preemptions = MAX_PREEMPTIONS
    others = [drive.add(request(f"q{i}", 4, 22, tenant_key="modest"))[0] for i in range(3)]
    drive.planner.roster.service.add("greedy", 10_000)
    drive.run()
    assert hunted.preemptions == MAX_PREEMPTIONS
    assert sum(other.preemptions for other in others) > 0
    assert drive.order[0] == ("hunted", 0)


def test_blocks_on_their_way_back_need_no_second_victim() -> None:
    """A purged victim's blocks are zeroed first, so they come one step later: that is no reason to evict another."""
    drive = Drive(blocks=12, block_size=2, max_step_tokens=64)
    drive.add(*(request(f"q{i}", 6, 12, scope=b"a") for i in range(3)))
    drive.step()
    drive.planner.purge([b"a"])
    drive.runner.zero_blocks(drive.planner.take_dirty())
    before = 0
    while drive.step() is not None:
        assert drive.planner.roster.preemptions <= before + 1
        before = drive.planner.roster.preemptions
    drive.idle()
    assert before > 0


def test_a_promise_ends_with_its_holder() -> None:
    """Blocks promised to a sequence that is cancelled are everybody's again."""
    drive = Drive(blocks=16, block_size=2, prefix_cache=False)
    drive.add(request("capped", 4, 20))[0].preemptions = MAX_PREEMPTIONS
    drive.step()
    assert drive.planner.roster.promised == 10
    drive.add(request("big", 20, 6))
    assert drive.step() is not None
    assert len(drive.planner.roster.running) == 1
    drive.cancel("capped")
    assert drive.planner.roster.promised == 0
    drive.run()
    assert drive.last["big", 0].finish == "length"


def test_who_comes_leaves_room_to_grow() -> None:
    """A newcomer is let in only if a block is left for each that runs: else it would push one out at once."""
    drive = Drive(blocks=8, block_size=2, prefix_cache=False, max_step_tokens=64)
    drive.add(request("a", 4, 4), request("b", 4, 4), request("c", 8, 3))
    drive.step()
    assert [s.id for s in drive.planner.roster.running] == ["a", "b"]
    drive.run()
    assert drive.planner.roster.preemptions == 0


def test_preempted_inside_its_prompt() -> None:
    """What was computed of a prompt before the preemption is billed once, the rest when it is computed."""
    drive = Drive(blocks=16, block_size=2, prefix_cache=False, max_step_tokens=2)
    old = drive.add(request("old", 2, 20))[0]
    young = drive.add(request("young", 20, 4))[0]
    while not young.preemptions:
        assert drive.step() is not None
    assert 0 < young.prompt_computed < 20
    assert old.finish is None
    drive.run()
    assert drive.last["young", 0].prompt_computed == 20
    assert young.record is not None
    assert young.record.recomputed > 0


def test_a_victims_copies_go_with_it() -> None:
    """Two choices lose their blocks in the step that was to copy their tail; others copy into the same blocks."""
    drive = Drive(blocks=5, block_size=2, prefix_cache=False, max_step_tokens=64)
    drive.add(
        request("greedy", 3, 4, n=2, tenant_key="greedy"),
        request("modest", 3, 4, n=4, tenant_key="modest"),
    )
    drive.step()
    drive.planner.roster.service.add("greedy", 10_000)
    plan = drive.step()
    assert plan is not None
    assert [chunk.sequence.id for chunk in plan.chunks] == ["modest"] * 4
    assert len(plan.copies) == 3
    drive.run()
