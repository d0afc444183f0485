"""Prefix cache, shared prompts and copy on write."""

from __future__ import annotations

import pytest

from tests.workers.engine.drive import Drive, request
from workers.engine.block_hash import chain_keys
from workers.protocol import SamplingParams


def cached(drive: Drive, name: str) -> int:
    return drive.last[name, 0].prompt_cached


@pytest.mark.parametrize("blocks", [1, 2, 8])
@pytest.mark.parametrize("most", [1, 5])
def test_whole_prompt_cached(blocks: int, most: int) -> None:
    """engine A9: a prompt of exactly k blocks hits at most len - 1 tokens; one is always left to compute."""
    drive = Drive()
    prompt = list(range(4 * blocks))
    for name in ("first", "again"):
        drive.add(request(name, prompt, most))
        drive.run()
    assert cached(drive, "first") == 0
    assert cached(drive, "again") == 4 * (blocks - 1)
    assert drive.tokens["first", 0] == drive.tokens["again", 0]


def test_mixed_hits_and_misses() -> None:
    """engine A11: half the burst is warm, half cold."""
    drive = Drive(blocks=400, max_step_tokens=48)
    warm = [list(range(i * 100, i * 100 + 13)) for i in range(6)]
    drive.add(*(request(f"warm{i}", prompt) for i, prompt in enumerate(warm)))
    drive.run()
    for i in range(6):
        drive.add(request(f"hit{i}", [*warm[i], 5, 6]), request(f"miss{i}", 13))
    drive.run()
    assert [cached(drive, f"hit{i}") for i in range(6)] == [12] * 6
    assert [cached(drive, f"miss{i}") for i in range(6)] == [0] * 6
    assert drive.planner.stats().hit_tokens == 72
    assert drive.planner.stats().hot_prefixes


def test_scopes_and_adapters_are_apart() -> None:
    """engine A1, engine A5, security 3: the same prompt under another scope or adapter computes everything itself."""
    drive = Drive(blocks=200)
    prompt = list(range(12))
    for number, (scope, adapter) in enumerate(
        [(b"a", None), (b"b", None), (b"", "a"), (b"a", "a"), (b"a", ""), (b"", None)]
    ):
        drive.add(request(f"q{number}", prompt, scope=scope, adapter=adapter))
        drive.run()
        assert cached(drive, f"q{number}") == 0
    drive.add(request("again", prompt, scope=b"a"))
    drive.run()
    assert cached(drive, "again") == 8


def test_public_prefix_is_shared_and_nothing_else() -> None:
    """Two tenants share the blocks inside the registered prefix; the blocks behind it are each one's own."""
    drive = Drive()
    prompt = list(range(20))
    for name in ("one", "two"):
        drive.add(request(name, prompt, scope=name.encode(), tenant_key=name, public_prefix_tokens=10))
        drive.run()
    assert cached(drive, "two") == 8
    ticket = drive.planner.purge([b"one"])
    assert ticket.pending == 0
    assert ticket.blocks > 0
    drive.planner.take_dirty()
    drive.add(request("three", prompt, scope=b"three", public_prefix_tokens=10))
    drive.run()
    assert cached(drive, "three") == 8


def test_cache_off() -> None:
    drive = Drive(prefix_cache=False)
    for name in ("a", "b"):
        drive.add(request(name, list(range(12))))
        drive.run()
    assert cached(drive, "b") == 0
    assert drive.planner.pool.cached == 0
    assert drive.planner.stats().query_tokens == 0


def test_output_is_cached_too() -> None:
    """The next turn of a conversation hits the last turn's answer."""
    drive = Drive()
    drive.add(request("turn", list(range(6)), 10))
    drive.run()
    drive.add(request("next", [*range(6), *drive.tokens["turn", 0], 1, 2]))
    drive.run()
    assert cached(drive, "next") == 12


def test_nothing_is_hit_before_it_is_computed() -> None:
    """Two equal prompts in the same step both compute: a block is published only after its forward pass."""
    drive = Drive(max_step_tokens=64)
    drive.add(request("a", list(range(12))), request("b", list(range(12))))
    drive.run()
    assert cached(drive, "a") == cached(drive, "b") == 0
    assert drive.planner.pool.cached == 3


@pytest.mark.parametrize(("length", "copies"), [(8, 0), (9, 2)])
def test_choices_share_their_prompt(length: int, copies: int) -> None:
    """engine I1: choices compute the prompt once, share its full blocks, and copy a partial tail when they write."""
    drive = Drive(max_step_tokens=64, prefix_cache=False)
    drive.add(request("q", length, 3, n=3))
    drive.step()
    assert drive.runner.rows == length
    assert drive.planner.pool.used == -(-length // 4)
    drive.step()
    assert drive.planner.pool.used == length // 4 + 3
    drive.run()
    assert drive.runner.copies == copies
    assert {drive.last["q", i].prompt_computed for i in (1, 2)} == {0}
    assert drive.last["q", 0].prompt_computed == length


def test_choices_equal_seeded_single_runs() -> None:
    """Choice i of a request with seed s is the single run with seed s + i."""
    drive = Drive()
    prompt = list(range(7))
    drive.add(request("many", prompt, 6, n=4, params=SamplingParams(seed=11, ignore_eos=True)))
    drive.run()
    for i in range(4):
        drive.add(request(f"single{i}", prompt, 6, params=SamplingParams(seed=11 + i, ignore_eos=True)))
        drive.run()
        assert drive.tokens["many", i] == drive.tokens[f"single{i}", 0]
    assert len({tuple(drive.tokens["many", i]) for i in range(4)}) == 4


def test_unseeded_choices_differ_and_repeat() -> None:
    """Without a seed every choice has its own stream; it follows from engine seed and request, not from the batch."""
    seeds = []
    for _ in range(2):
        drive = Drive(seed=3)
        made = drive.planner.add(request("q", 4, n=3, params=SamplingParams()))
        seeds.append([sequence.seed for sequence in made])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_purge_while_running() -> None:
    """security 15: a purge zeroes what is cached at once, follows what is in use, and nothing is published later."""
    drive = Drive(block_size=2)
    prompt = list(range(9))
    drive.add(request("old", prompt, 4, scope=b"a"), request("other", prompt, 9, scope=b"b"))
    drive.run()
    drive.add(request("busy", prompt, 8, n=2, scope=b"a"), request("late", 3, 30, scope=b"a"))
    drive.step()
    ticket = drive.planner.purge([b"a"])
    drive.runner.zero_blocks(drive.planner.take_dirty())
    assert ticket.pending > 0
    assert len(ticket.users) == 3
    drive.add(request("fresh", prompt, 4, scope=b"a"))
    while drive.step() is not None:
        if ("late", 0) not in drive.last:
            assert ticket.users
    assert not ticket.users
    assert cached(drive, "fresh") == 0
    drive.idle()
    # What the fresh request cached after the purge is all that the scope still has.
    assert drive.planner.pool.cached * 2 >= drive.runner.holds(b"a") - 2
    drive.planner.purge([b"a"])
    drive.runner.zero_blocks(drive.planner.take_dirty())
    assert drive.runner.holds(b"a") == 0
    assert drive.runner.holds(b"b") > 0
    assert drive.planner.pool.dirty == 0


def test_cached_blocks_by_tenant_are_those_of_the_32_that_have_most() -> None:
    drive = Drive(blocks=600)
    for number in range(40):
        drive.add(request(f"q{number}", 4 * (1 + number), tenant_key=f"t{number}", scope=bytes([number])))
        drive.run()
    reported = drive.planner.stats().cached_by_tenant
    assert len(reported) == 32
    assert reported["t39"] >= 40
    assert "t0" not in reported


def test_purge_by_label_while_running() -> None:
    """A document is deleted: nothing of a request with its tag can be hit; who runs on its blocks leaves none."""
    drive = Drive(block_size=2)
    prompt = list(range(9))
    drive.add(request("first", prompt, 4, labels=[b"alice", b"doc"]))
    drive.run()
    drive.add(request("other", 9, 4, labels=[b"bob"]))
    drive.run()
    # Bob asks about the same text: he hits Alice's blocks while the document goes.
    drive.add(request("busy", prompt, 8, labels=[b"bob"]))
    drive.step()
    ticket = drive.planner.purge([], [b"doc"])
    drive.runner.zero_blocks(drive.planner.take_dirty())
    assert ticket.pending >= 4
    drive.run()
    assert not ticket.users
    drive.idle()
    drive.runner.zero_blocks(drive.planner.take_dirty())
    drive.add(request("again", prompt, 4, labels=[b"alice"]), request("own", drive.sent["other", 0].tokens, 4))
    drive.run()
    assert cached(drive, "again") == 0
    assert cached(drive, "own") == 8


def test_purge_of_a_public_prefix_is_by_its_keys() -> None:
    drive = Drive()
    prompt = list(range(20))
    for name in ("one", "two"):
        drive.add(request(name, prompt, scope=name.encode(), public_prefix_tokens=10))
        drive.run()
    assert cached(drive, "two") == 8
    keys = chain_keys(b"", "rev", None, prompt[:10], 4, public_tokens=10)
    ticket = drive.planner.purge([], [], keys)
    assert ticket.blocks == 2
    drive.runner.zero_blocks(drive.planner.take_dirty())
    drive.add(request("three", prompt, scope=b"three", public_prefix_tokens=10))
    drive.run()
    assert cached(drive, "three") == 0


def test_ten_thousand_blocks_are_found_and_zeroed_in_one_go() -> None:
    """Ten thousand blocks of one tenant, some with the label: one purge, one call to zero them."""
    drive = Drive(blocks=10_000, block_size=1, max_step_tokens=20_000, max_running=8)
    drive.add(*(request(f"r{number}", 1200, 2, labels=[b"odd" if number % 2 else b"even"]) for number in range(8)))
    drive.run()
    assert drive.planner.pool.cached > 9000
    ticket = drive.planner.purge([], [b"odd"])
    assert ticket.blocks > 4500
    assert len(drive.planner.take_dirty()) == ticket.blocks
    assert drive.planner.purge([b"scope"]).blocks > 4500
    drive.planner.take_dirty()
    drive.planner.check()
