"""Several block tables and windows: what is given back, what a prefix hit needs, and that nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.drive import Drive, request
from workers.engine.block_hash import BlockKey
from workers.engine.plan import Sampled
from workers.engine.roster import MAX_PREEMPTIONS
from workers.engine.tables import DEAD, Tables
from workers.protocol import Beams

WINDOW, SIZE = 8, 4
HYBRID = (0, WINDOW, WINDOW)


def test_dead_blocks_are_those_before_the_window() -> None:
    """A row attends to itself and the window - 1 tokens before it."""
    tables = Tables((0, 8), 4)
    assert [tables.dead(1, row) for row in (0, 7, 10, 11, 12, 15, 16)] == [0, 0, 0, 1, 1, 2, 2]
    assert tables.dead(0, 1000) == 0
    assert not Tables().slide
    assert Tables((0,)).plain
    assert not Tables((8,)).plain


def keys(count: int) -> list[BlockKey]:
    return [BlockKey(bytes([index]) * 32) for index in range(count)]


@pytest.mark.parametrize("window", [1, 4, 5, 8, 9])
def test_a_hit_needs_the_whole_window_and_no_more(window: int) -> None:
    """Of the last blocks before the hit, exactly those with a token that the next row attends to."""
    tables, chain = Tables((0, window), 4), keys(6)
    published = {key: index for index, key in enumerate(chain)}
    for length in range(1, 7):
        needed = range(max(0, length * 4 + 1 - window) // 4, length)
        there = published | {BlockKey(chain[index] + b"\x01"): 10 + index for index in needed}
        expected = [list(range(length)), [DEAD] * needed.start + [10 + index for index in needed]]
        assert tables.hit(chain, length, there.get) == expected
        for lost in needed:
            fewer = {key: block for key, block in there.items() if block != 10 + lost}
            assert len(tables.hit(chain, length, fewer.get)[0]) < length


def test_without_a_table_that_keeps_all_only_the_window_must_be_there() -> None:
    chain = keys(9)
    there = {chain[7]: 1, chain[8]: 2}
    assert Tables((8,), 4).hit(chain, 9, there.get) == [[DEAD] * 7 + [1, 2]]
    assert Tables((9,), 4).hit(chain, 9, there.get) == [[DEAD] * 7 + [1, 2]]
    assert Tables((10,), 4).hit(chain, 9, there.get) == [[]]


@pytest.mark.parametrize("windows", [HYBRID, (WINDOW,), (0, 3), (0, 5, 12), (0, 0)])
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_long_sequence_holds_its_window_only(windows: tuple[int, ...], chunk: int | None) -> None:
    drive = Drive(blocks=200, windows=windows, max_step_tokens=16, max_chunk_tokens=chunk)
    tables = drive.planner.limits.tables
    (one,) = drive.add(request("long", 60, 40))
    most = [0] * len(windows)
    while drive.step() is not None and one.finish is None:
        held = [sum(block != DEAD for block in table) for table in one.tables()]
        most = [max(pair) for pair in zip(most, held, strict=True)]
    drive.run()
    for table, window in enumerate(windows):
        assert most[table] <= tables.most(table, 99)
        assert most[table] >= (-(-window // SIZE) if window else 25)
    if windows == HYBRID:
        assert drive.planner.stats().windows == {"all": (0, 0), str(WINDOW): (0, 0)}


def test_stats_tell_what_windows_hold_and_what_they_gave_back() -> None:
    drive = Drive(blocks=200, windows=HYBRID, max_step_tokens=16)
    drive.add(request("one", 64, 8))
    for _ in range(6):
        drive.step()
    held, outside = drive.planner.stats().windows[str(WINDOW)]
    assert drive.planner.stats().windows["all"] == (17, 0)
    assert held + outside == 2 * 17
    assert held <= 2 * 4
    drive.run()
    assert Drive().planner.stats().windows == {}


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 3])
@pytest.mark.parametrize("windows", [HYBRID, (WINDOW,)])
def test_prefix_hits_at_the_edges_of_a_window(windows: tuple[int, ...], length: int) -> None:
    """The runner reads every row's window back: a hit on too little would fail there."""
    drive = Drive(blocks=200, windows=windows)
    prompt = list(range(1, length + 1))
    drive.add(request("first", prompt, 30))
    drive.run()
    drive.add(request("again", [*prompt, 7, 8], 30))
    drive.run()
    hit = drive.last["again", 0].prompt_cached
    assert hit == length // SIZE * SIZE
    drive.add(request("whole", prompt, 5))
    drive.run()
    assert drive.last["whole", 0].prompt_cached == (length - 1) // SIZE * SIZE


def test_a_hit_is_cut_to_where_the_window_is_still_cached() -> None:
    """The windowed blocks in the middle are evicted: the hit ends before, or after where they do not matter."""
    drive = Drive(blocks=200, windows=HYBRID)
    prompt = list(range(1, 41))
    drive.add(request("first", prompt, 1))
    drive.run()
    pool = drive.planner.pool
    (probe,) = drive.add(request("probe", prompt, 1))
    drive.step()
    lost = [probe.keys[index] + b"\x02" for index in (4, 5)]
    drive.run()
    for key in lost:
        block = pool.find(BlockKey(key))
        assert block is not None
        pool.acquire([block])
        pool._forget(block)
        pool.release([block])
    # Behind 40 tokens the window begins at 33; behind 28, 24 or 20 it needs what is lost, which is then computed again.
    for name, tokens, hit in (("beyond", 41, 40), ("cut", 30, 16), ("mended", 30, 28)):
        drive.add(request(name, prompt[:tokens] + [1] * (tokens == 41), 1))
        drive.run()
        assert drive.last[name, 0].prompt_cached == hit


@pytest.mark.parametrize("windows", [HYBRID, (0, 3)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pressure_preempts_and_everybody_gets_on(windows: tuple[int, ...], prefix_cache: bool) -> None:
    tables = Tables(windows, SIZE, 16)
    blocks = int(1.3 * tables.worst(119)) + 1
    drive = Drive(blocks=blocks, windows=windows, prefix_cache=prefix_cache, max_step_tokens=16)
    drive.add(*(request(f"q{number}", 20, 100) for number in range(5)))
    drive.run()
    assert drive.planner.roster.preemptions > 0
    assert all(last.finish == "length" for last in drive.last.values())


@pytest.mark.parametrize("windows", [HYBRID, (WINDOW,), (0, 3)])
def test_whoever_was_preempted_too_often_comes_back_though_its_window_is_cached(windows: tuple[int, ...]) -> None:
    """Its worst case is the whole pool: blocks of the window that it could hit are not asked for a second time."""
    whole = Drive(blocks=400, windows=windows, max_step_tokens=16).planner.limits.worst_blocks(40, 60)
    drive = Drive(blocks=whole, windows=windows, max_step_tokens=16)
    (one,) = drive.add(request("one", 40, 60))
    for _ in range(6):
        drive.step()
    one.preemptions = MAX_PREEMPTIONS - 1
    drive.planner.roster.preempt(one, drive.now)
    drive.planner.roster.sweep()
    drive.run()
    assert drive.last["one", 0].finish == "length"


def test_one_windowed_table_runs_a_crowd_that_one_table_could_not() -> None:
    """A pool of less than two whole sequences holds five windows."""
    drive = Drive(blocks=40, windows=(WINDOW,), max_step_tokens=16)
    drive.add(*(request(f"q{number}", 20, 100) for number in range(5)))
    for _ in range(60):
        drive.step()
    assert len(drive.planner.roster.running) == 5
    drive.run()
    assert drive.planner.roster.preemptions == 0


def test_a_windowed_model_admits_what_a_uniform_one_cannot() -> None:
    """The same bytes, a context of 4 windows: more sequences run at once."""
    running = {}
    for windows in ((0, 0, 0, 0, 0, 0), (0, 16, 16, 16, 16, 16)):
        drive = Drive(blocks=240, windows=windows, max_step_tokens=16, prefix_cache=False)
        drive.add(*(request(f"q{number}", 56, 8) for number in range(6)))
        most = 0
        while drive.step() is not None:
            most = max(most, len(drive.planner.roster.running))
        drive.idle()
        running[windows[1]] = most
    assert running[16] >= 1.5 * running[0]


@pytest.mark.parametrize("windows", [HYBRID, (WINDOW,)])
def test_purge_zeroes_every_table(windows: tuple[int, ...]) -> None:
    """Cached blocks at once, those in use when they slide out of their windows or are released."""
    drive = Drive(blocks=120, windows=windows, max_step_tokens=16)
    drive.add(request("done", 30, 10, scope=b"gone"))
    drive.run()
    drive.add(request("busy", 30, 40, scope=b"gone"), request("other", 30, 40, scope=b"stays"))
    for _ in range(8):
        drive.step()
    ticket = drive.planner.purge([b"gone"])
    assert ticket.users
    drive.run()
    assert not ticket.users
    drive.runner.zero_blocks(drive.planner.take_dirty())
    assert drive.runner.holds(b"gone") == 0
    assert drive.runner.holds(b"stays") > 0


def test_purge_by_key_finds_the_blocks_of_every_table() -> None:
    drive = Drive(blocks=60, windows=HYBRID)
    (one,) = drive.add(request("p", list(range(16)), 2, public_prefix_tokens=16))
    drive.step()
    chain = list(one.keys)
    drive.run()
    assert drive.planner.purge([], keys=chain[:4]).blocks == 3 * 4


@given(
    windows=st.sampled_from([HYBRID, (WINDOW,), (0, 3), (5,), (0, 4, 9)]),
    seeds=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(1, 3), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=6,
    ),
    spare=st.integers(0, 30),
    chunk=st.sampled_from([None, 1, 5]),
    purge_at=st.integers(0, 40),
    twice_at=st.sampled_from([0, 3, 20]),
)
@settings(max_examples=60, deadline=None)
def test_any_crowd_gives_the_tokens_of_running_alone(
    windows: tuple[int, ...],
    seeds: list[tuple[int, int, int, bool, int]],
    spare: int,
    chunk: int | None,
    purge_at: int,
    twice_at: int,
) -> None:
    """n > 1, shared prefixes, tiny pools, small chunks, purges on the way; the runner reads every window back."""
    tables = Tables(windows, SIZE, chunk or 18)
    blocks = tables.worst(70) + tables.count + spare
    drive = Drive(blocks=blocks, windows=windows, max_step_tokens=16, max_chunk_tokens=chunk, twice_at=twice_at)
    for number, (length, new, n, shared, wait) in enumerate(seeds):
        prompt = list(range(1, length + 1)) if shared else length
        drive.add(request(f"r{number}", prompt, new, n=n, scope=b"ab"[number % 2 :][:1]))
        for _ in range(wait):
            drive.step()
    for step in range(20_000):
        if step == purge_at:
            drive.planner.purge([b"a"])
            drive.runner.zero_blocks(drive.planner.take_dirty())
        if drive.step() is None:
            break
    drive.idle()


@pytest.mark.parametrize("windows", [HYBRID, (WINDOW,), (0, 3)])
@pytest.mark.parametrize("blocks", [400, 60])
def test_guesses_reach_over_every_table(windows: tuple[int, ...], blocks: int) -> None:
    """Speculation: rows behind a wrong guess are written again, in every table; windows slide by what was right."""
    drive = Drive(
        blocks=blocks, windows=windows, vocab=3, max_step_tokens=24, speculation={"method": "ngram", "tokens": 5}
    )
    drive.add(*(request(f"q{number}", [1, 2, 1, 0, 2, 1, 2, 1, 0], 60) for number in range(3)))
    drive.run()
    stats = drive.planner.stats()
    assert stats.drafts_accepted > 0
    assert stats.drafts_rejected > 0


@pytest.mark.parametrize("windows", [HYBRID, (WINDOW,)])
def test_beams_share_and_copy_in_every_table(windows: tuple[int, ...]) -> None:
    """The answers are those of one table; pressure starts searches over."""
    found = {}
    for kind in ((0,), windows):
        drive = Drive(blocks=400, windows=kind, max_step_tokens=32)
        drive.add(request("beam", 21, 25, beams=Beams(3), n=2))
        for _ in range(500):
            if drive.step() is None:
                break
        found[kind] = [drive.tokens["beam", index] for index in range(2)]
        assert drive.planner.pool.used == 0
    assert found[windows] == found[(0,)]


@pytest.mark.parametrize("windows", [(0,), HYBRID])
def test_a_search_whose_beam_has_too_few_candidates_ends_alone(windows: tuple[int, ...]) -> None:
    """The rest of the step is booked: also the parts of its other beams, which have no blocks any more."""
    drive = Drive(blocks=400, windows=windows, max_step_tokens=64)
    drive.add(request("search", 20, 30, beams=Beams(width=3)), request("other", 20, 30))
    for _ in range(4):
        drive.step()
    plan = drive.planner.plan(drive.now)
    assert plan is not None
    result = drive.runner.run(plan)
    beam = next(place for place, chunk in enumerate(plan.chunks) if chunk.sequence.search is not None)
    result.sampled[beam] = Sampled([])
    drive.take(drive.planner.commit(plan, result, drive.now))
    drive.planner.check()
    assert drive.last["search", 0].error == "internal"
    drive.run()
    assert drive.last["other", 0].finish == "length"


def test_without_a_kv_cache_nothing_is_given_back() -> None:
    drive = Drive(blocks=200, windows=HYBRID, kv_cache_reuse=False, max_step_tokens=64)
    drive.add(*(request(f"q{number}", 30, 10) for number in range(3)))
    drive.run()
    assert not drive.planner.limits.tables.slide
