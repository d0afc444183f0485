"""What lies below the device: whatever goes down and comes up again is what its key says, or is not there."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.workers.engine.drive import request
from tests.workers.engine.tiered import MemoryStore, TieredDrive
from workers.engine.block_hash import BlockKey, chain_keys
from workers.engine.block_pool import Holding
from workers.engine.testing import FakeRunner
from workers.engine.tier_desk import TierDesk
from workers.engine.tier_rates import DISK, HOST, Rates
from workers.engine.tiers import Tiers
from workers.protocol import Generate, Prefetch

LONG = list(range(40))


def flood(drive: TieredDrive, name: str = "flood", blocks: int = 12) -> None:
    """Push everything out of the device, at least."""
    drive.add(request(name, blocks * 4 - 4, 2, scope=b"flood"))
    drive.run()


def prompt(drive: TieredDrive, name: str, tokens: list[int] = LONG, **fields: object) -> tuple[int, int]:
    """(cached, computed) prompt tokens of a request that runs alone."""
    drive.add(request(name, tokens, 2, **fields))
    drive.run()
    last = drive.last[name, 0]
    return last.prompt_cached, last.prompt_computed


def test_what_the_device_evicts_comes_back_from_the_host() -> None:
    drive = TieredDrive(slots=32, blocks=12)
    assert prompt(drive, "a") == (0, 40)
    flood(drive)
    assert prompt(drive, "b") == (36, 4)
    told = drive.tiers.stats()[HOST]
    assert told.restored_blocks > 0
    assert told.hit_tokens == told.restored_blocks * 4
    assert drive.runner.restores == told.restored_blocks
    assert drive.planner.pool.hit_tokens == 36


def test_records_say_what_came_back() -> None:
    """Of a prefix that the device had lost, and of what a preempted sequence had computed; nothing of a plain hit."""
    drive = TieredDrive(slots=32, blocks=12)
    prompt(drive, "a")
    flood(drive)
    before = drive.tiers.stats()[HOST].restored_blocks
    prompt(drive, "b")
    prompt(drive, "c")
    made = {record.id: record for record in drive.planner.take_records()}
    restored = (drive.tiers.stats()[HOST].restored_blocks - before) * 4
    assert [phase.restored for phase in made["b"].phases if phase.kind == "prefill"] == [restored]
    assert restored > 0
    for name in ("a", "c"):
        assert [phase.restored for phase in made[name].phases if phase.kind == "prefill"] == [0]


def test_without_tiers_it_is_computed_again() -> None:
    """Or the test above would show nothing."""
    drive = TieredDrive(slots=2, blocks=12)
    prompt(drive, "a")
    flood(drive)
    assert prompt(drive, "b")[1] > 4


def test_what_the_host_evicts_comes_back_from_the_disk() -> None:
    drive = TieredDrive(slots=24, files=100, blocks=12)
    prompt(drive, "a")
    for number in range(4):
        flood(drive, f"flood{number}")
    assert drive.store.writes > 0
    cached, _ = prompt(drive, "b")
    assert cached == 36
    assert drive.tiers.stats()[DISK].hit_tokens > 0


def test_what_is_below_is_not_written_again() -> None:
    drive = TieredDrive(slots=24, files=100, blocks=12)
    for number in range(3):
        prompt(drive, f"a{number}")
        for _ in range(3):
            flood(drive, f"flood{number}{_}")
    writes = drive.store.writes
    keys = len(drive.store.disk)
    assert writes == keys  # each once


def test_a_restart_keeps_the_disk() -> None:
    drive = TieredDrive(slots=24, files=100, blocks=12)
    prompt(drive, "a")
    for number in range(4):
        flood(drive, f"flood{number}")
    drive.restart()
    drive.work()
    cached, _ = prompt(drive, "b")
    assert cached > 0
    assert drive.tiers.stats()[DISK].hit_tokens == cached


def test_a_damaged_file_is_a_miss_and_goes() -> None:
    drive = TieredDrive(slots=24, files=100, blocks=12)
    prompt(drive, "a")
    for number in range(4):
        flood(drive, f"flood{number}")
    spoiled = set(drive.store.disk)
    drive.store.spoiled = set(spoiled)
    assert prompt(drive, "b")[0] < 36
    drive.work()
    assert not spoiled <= set(drive.store.disk) or drive.store.spoiled < spoiled
    assert drive.tiers.stats()[DISK].errors > 0


def test_a_full_disk_harms_nobody_and_is_tried_again_later() -> None:
    drive = TieredDrive(slots=12, files=100, blocks=12)
    drive.store.full = True
    for number in range(4):
        flood(drive, f"flood{number}")
    told = drive.tiers.stats()[DISK]
    assert not told.up
    assert told.errors
    assert told.bytes == 0
    drive.store.full = False
    flood(drive, "soon")
    assert not drive.store.disk
    drive.now += 61_000_000_000
    flood(drive, "later")
    flood(drive, "last")
    assert drive.store.disk
    assert drive.tiers.stats()[DISK].up


def test_a_disk_that_does_not_answer_delays_a_request_for_a_bounded_time() -> None:
    drive = TieredDrive(slots=24, files=100, blocks=12, eager=True)
    prompt(drive, "a")
    for number in range(4):
        flood(drive, f"flood{number}")
    drive.work()
    drive.eager = False
    drive.add(request("b", LONG, 2))
    drive.add(request("c", [7] * 9, 2))
    for _ in range(20):
        drive.step()
    assert ("c", 0) in drive.last, "others overtake who waits for the disk"
    assert ("b", 0) not in drive.last
    drive.now += 300_000_000
    drive.run()
    assert drive.last["b", 0].finish == "length"


def down(**fields: object) -> tuple[TieredDrive, list[bytes]]:
    """A prompt that lies on the disk only, and its keys."""
    drive = TieredDrive(slots=24, files=100, blocks=12, eager=False)
    prompt(drive, "a", **fields)
    for number in range(6):
        flood(drive, f"flood{number}")
        drive.work()
    chain = chain_keys(b"scope", "rev", None, LONG, 4)
    assert not drive.tiers.host.lookup(chain)
    assert chain[0] in drive.store.disk
    return drive, [bytes(key) for key in chain[:9]]  # its last token is always computed


def test_what_a_queued_request_will_want_is_read_before_it_comes() -> None:
    """Then it is not overtaken, and its blocks come from memory."""
    drive, keys = down()
    drive.desk.handle(Prefetch(keys))
    drive.step()
    drive.work()
    told = drive.tiers.stats()[DISK]
    assert told.early_blocks == 9 == len(drive.tiers.host.lookup(chain_keys(b"scope", "rev", None, LONG, 4)[:9]))
    assert not drive.store.jobs
    drive.add(request("b", LONG, 2))
    drive.step()
    assert drive.tiers.disk is not None
    assert drive.tiers.disk.busy == 0, "nothing is left to read"
    drive.run()
    assert drive.last["b", 0].prompt_cached == 36
    drive.tiers.check()


def test_a_hint_waits_for_the_disk_and_old_ones_are_forgotten() -> None:
    drive, keys = down()
    drive.add(request("b", LONG, 2))
    drive.step()
    busy = len(drive.store.jobs)
    assert busy > 0
    for _ in range(6):
        drive.desk.handle(Prefetch(keys))
    assert len(drive.tiers._expected) == 4
    drive.step()
    assert len(drive.store.jobs) == busy, "a request that is here comes first"
    drive.work()
    drive.run()
    assert not drive.tiers._expected
    assert drive.tiers.stats()[DISK].early_blocks == 0, "it was there already"
    assert drive.last["b", 0].prompt_cached == 36


@pytest.mark.parametrize("spoiled", [True, False])
def test_a_hint_of_what_is_not_there_or_damaged_harms_nobody(spoiled: bool) -> None:
    drive, keys = down()
    if spoiled:
        drive.store.spoiled.update(drive.store.disk)
    drive.desk.handle(Prefetch(keys if spoiled else [bytes(32)]))
    drive.step()
    drive.work()
    assert drive.tiers.stats()[DISK].early_blocks == 0
    drive.eager = True
    assert prompt(drive, "b") == ((0, 40) if spoiled else (36, 4))
    drive.tiers.check()


def test_a_purge_takes_what_is_being_read_early() -> None:
    drive, keys = down()
    drive.desk.handle(Prefetch(keys))
    drive.step()
    drive.planner.purge([b"scope"])
    drive.desk.carry_out()
    drive.work()
    assert drive.store.holds(b"scope") == 0
    assert drive.tiers.stats()[DISK].early_blocks == 0
    drive.tiers.check()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_sequence_comes_back_without_a_recompute(prefix_cache: bool) -> None:
    """gateway E: swap instead of recompute; without room for it, recompute."""
    outcomes = []
    for slots in (64, 1):
        drive = TieredDrive(slots=slots, blocks=14, prefix_cache=prefix_cache)
        for number in range(4):
            drive.add(request(f"r{number}", 13 - number, 30))
        drive.run()
        roster = drive.planner.roster
        assert roster.preemptions > 0
        outcomes.append((roster.recomputed, drive.tiers.swaps))
    (swapped, swaps), (recomputed, _) = outcomes
    assert swaps > 0
    assert swapped < recomputed
    if not prefix_cache:
        assert swapped == 0


def test_nobody_hits_what_was_swapped_out() -> None:
    drive = TieredDrive(slots=64, blocks=14, prefix_cache=False)
    for number in range(4):
        drive.add(request(f"r{number}", 9, 30))
    for _ in range(60):
        drive.step()
        assert not drive.tiers.host.cached
    drive.run()
    assert drive.tiers.host.free == 64


def test_a_cancelled_sequence_gives_its_slots_back() -> None:
    drive = TieredDrive(slots=64, blocks=14, prefix_cache=False)
    for number in range(4):
        drive.add(request(f"r{number}", 9, 30))
    while not any(s.swap for all_of in drive.planner.roster.requests.values() for s in all_of):
        drive.step()
    held = drive.tiers.host.used
    assert held
    for number in range(4):
        drive.cancel(f"r{number}")
    assert drive.tiers.host.free == 64


def test_a_purge_reaches_every_tier_and_counts_each() -> None:
    drive = TieredDrive(slots=12, files=100, blocks=12)
    prompt(drive, "a", scope=b"secret")
    for number in range(2):
        flood(drive, f"flood{number}")
    prompt(drive, "b", [*LONG[:8], 1, 2, 3, 4], scope=b"secret")
    flood(drive, "more")
    assert drive.store.holds(b"secret")
    ticket = drive.planner.purge([b"secret"])
    assert ticket.below is not None
    files = len(ticket.below.files)
    drive.desk.carry_out()
    drive.desk.purged(ticket.below)
    assert files
    assert not ticket.complete
    assert ticket.receipt("p").pending == files
    drive.work()
    assert ticket.complete
    receipt = ticket.receipt("p")
    assert (receipt.pending, receipt.tiers["disk"]) == (0, files)
    assert not drive.store.holds(b"secret")
    drive.runner.zero_blocks(drive.planner.take_dirty())
    assert prompt(drive, "c", scope=b"secret")[0] == 0


def test_a_purge_by_label_finds_what_went_down_with_it() -> None:
    drive = TieredDrive(slots=12, files=100, blocks=12)
    prompt(drive, "a", scope=b"tenant", labels=[b"doc"])
    for number in range(2):
        flood(drive, f"flood{number}")
    assert drive.store.holds(b"tenant")
    ticket = drive.planner.purge([], [b"doc"])
    drive.desk.carry_out()
    drive.work()
    assert ticket.below is not None
    assert ticket.below.slots + ticket.below.unlinked + len(ticket.below.files) > 0
    assert not drive.store.holds(b"tenant")


def test_a_purge_during_the_scan_waits_for_its_end() -> None:
    drive = TieredDrive(slots=12, files=100, blocks=12)
    prompt(drive, "a", scope=b"secret")
    for number in range(3):
        flood(drive, f"flood{number}")
    assert drive.store.holds(b"secret")
    drive.restart()
    ticket = drive.planner.purge([b"secret"])
    assert ticket.below is not None
    drive.desk.purged(ticket.below)
    assert ticket.receipt("p").pending == 1
    drive.work()
    assert ticket.complete
    assert ticket.receipt("p").tiers["disk"] > 0
    assert not drive.store.holds(b"secret")


def test_a_file_that_cannot_be_unlinked_keeps_a_purge_open() -> None:
    drive = TieredDrive(slots=12, files=100, blocks=12)
    prompt(drive, "a", scope=b"secret")
    for number in range(3):
        flood(drive, f"flood{number}")
    drive.store.stuck = True
    ticket = drive.planner.purge([b"secret"])
    drive.desk.carry_out()
    assert ticket.below is not None
    drive.desk.purged(ticket.below)
    drive.work()
    assert not ticket.complete
    assert ticket.receipt("p").pending > 0


def test_files_end_with_their_scope() -> None:
    """A retention time holds on the disk too, also for a worker that no gateway tells."""
    drive = TieredDrive(slots=12, files=100, blocks=12)
    prompt(drive, "a", scope=b"window", cache_until=100.0)
    for number in range(3):
        flood(drive, f"flood{number}")
    assert any(file.holding.scope == b"window" and file.expires == 100.0 for file, _ in drive.store.disk.values())
    drive.now = 100_000_000_000
    drive.step()
    drive.work()
    assert not any(file.holding.scope == b"window" for file, _ in drive.store.disk.values())


def test_a_file_that_is_being_read_when_its_time_is_over_goes_afterwards() -> None:
    drive, _ = down(cache_until=100.0)
    drive.eager = False
    drive.add(request("reader", LONG, 2, cache_until=100.0))
    drive.step()
    assert drive.tiers.disk is not None
    assert drive.tiers.disk.busy
    drive.now = 100_000_000_000
    drive.step()
    drive.eager = True
    drive.run()
    drive.step()
    drive.work()
    assert not any(file.expires == 100.0 for file, _ in drive.store.disk.values())
    drive.planner.check()


def test_ends_of_files_that_are_gone_are_forgotten() -> None:
    """A disk is written over many times before a retention time of days has passed."""
    drive = TieredDrive(slots=4, files=8, blocks=12)
    for number in range(60):
        drive.add(request(f"q{number}", 40, 2, scope=b"window", cache_until=1e9))
        drive.run()
    disk = drive.tiers.disk
    assert disk is not None
    assert disk.written > 200
    assert len(disk._ending) < 100


def test_what_leaves_the_host_right_after_it_had_to_leave_the_disk_is_written_again() -> None:
    """A full disk gives up what the host still has; when that goes in the same plan, its new file must stay."""
    store = MemoryStore(FakeRunner(4, 4), 4, 2)
    store.runner.host = {slot: [None] * 4 for slot in range(4)}
    tiers = Tiers(4, 2, 4, rates=Rates(4), block_bytes=100)
    desk, files = TierDesk(tiers, store, lambda report: None), tiers.disk
    assert files is not None
    holding = Holding(b"scope", "owner", 1.0, frozenset())
    first, second, third = (BlockKey(bytes([number]) * 32) for number in range(3))

    def work() -> None:
        desk.carry_out()
        while store.jobs:
            desk.handle(store.jobs.popleft()())

    files.add(0, first, holding, 0)
    files.add(1, second, holding, 0)
    work()
    files.add(2, third, holding, 0)
    assert first not in files
    files.add(0, first, holding, 0)
    work()
    assert first in files
    assert set(store.disk) == {first, third}, "what the index knows is there, and nothing else"


def test_where_bringing_back_costs_more_it_is_computed_again() -> None:
    drive = TieredDrive(slots=32, blocks=12)
    prompt(drive, "a")
    flood(drive)
    rates = drive.tiers.rates
    rates.computed(1000, 1e6)
    rates.moved(HOST, 1, 1e9)
    assert prompt(drive, "b")[0] < 36
    assert drive.runner.restores == 0


class TierMachine(RuleBasedStateMachine):
    """Requests with shared beginnings in three scopes, a slow and faulty disk, purges, failed steps and restarts."""

    @initialize(slots=st.integers(1, 12), files=st.sampled_from([0, 3, 40]), prefix=st.booleans())
    def start(self, slots: int, files: int, prefix: bool) -> None:
        self.drive = TieredDrive(slots=slots, files=files, blocks=9, eager=False, prefix_cache=prefix)
        self.serial = 0

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 18),
        output=st.integers(1, 9),
        scope=st.sampled_from([b"x", b"y"]),
        label=st.sampled_from([[], [b"doc"]]),
        n=st.sampled_from([1, 1, 2]),
    )
    def ask(self, family: int, length: int, output: int, scope: bytes, label: list[bytes], n: int) -> None:
        self.serial += 1
        tokens = list(range(family * 100, family * 100 + length))
        self.drive.add(request(f"q{self.serial}", tokens, output, scope=scope, labels=label, n=n))

    @rule(steps=st.integers(1, 12))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.drive.step()

    @rule(most=st.integers(1, 6))
    def disk(self, most: int) -> None:
        self.drive.work(most)

    @rule()
    def later(self) -> None:
        self.drive.now += 400_000_000

    @rule(full=st.booleans())
    def fill_up(self, full: bool) -> None:
        self.drive.store.full = full

    @precondition(lambda self: self.drive.store.disk)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.drive.store.spoiled.add(data.draw(st.sampled_from(sorted(self.drive.store.disk))))

    @rule()
    def a_step_fails(self) -> None:
        drive = self.drive
        drive.now += 1
        plan = drive.planner.plan(drive.now)
        drive.desk.carry_out()
        if plan is not None:
            drive.runner.zero_blocks(plan.zero)
            drive.take(drive.planner.fail(plan, [plan.chunks[0].sequence.id] if plan.chunks else [], "internal"))

    @rule(back=st.integers(0, 4))
    def cancel(self, back: int) -> None:
        self.drive.cancel(f"q{self.serial - back}")

    @rule(scope=st.sampled_from([b"x", b"y"]), by_label=st.booleans())
    def purge(self, scope: bytes, by_label: bool) -> None:
        drive = self.drive
        ticket = drive.planner.purge([], [b"doc"]) if by_label else drive.planner.purge([scope])
        drive.runner.zero_blocks(drive.planner.take_dirty())
        drive.desk.carry_out()
        assert ticket.below is not None
        drive.desk.purged(ticket.below)
        drive.work()
        if not by_label and not drive.planner.roster.running:
            assert not drive.store.holds(scope)

    @rule()
    def restart(self) -> None:
        self.drive.restart()

    @rule()
    def finish(self) -> None:
        drive = self.drive
        for _ in range(400):
            drive.work()
            if drive.step() is None and not drive.store.jobs:
                break
        assert not len(drive.planner)
        drive.idle()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "drive"):
            self.drive.planner.check()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_generate_says_when_its_scope_ends() -> None:
    assert Generate("a", [1], 1).cache_until == 0.0
