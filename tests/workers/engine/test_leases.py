"""Leased blocks: nobody gets them, and all of them come back."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from tests.workers.engine.drive import request
from tests.workers.transfer.pair import FakeMover
from workers.config import EngineConfig
from workers.engine.leases import GiveBack, Offer, ReadBlocks
from workers.engine.loop import Engine
from workers.engine.testing import FakeRunner
from workers.protocol import Generate, Purge, StepOutputs

SECOND = 10**9


@dataclass
class Rig:
    """A prefill engine that is stepped by hand, with a clock of its own."""

    blocks: int = 8
    now: int = 0
    offers: dict[str, Offer | None] = field(default_factory=dict)
    news: list[StepOutputs] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = EngineConfig(block_size=4, role="prefill", transfer={"lease_s": 5})  # type: ignore[arg-type]
        self.runner = FakeRunner(self.blocks, 4)
        self.engine = Engine(
            config,
            self.runner,
            blocks=self.blocks,
            max_context=1000,
            revision="rev",
            eos_ids=(),
            on_outputs=self.news.append,
            clock_ns=lambda: self.now,
            mover=FakeMover(self.runner),
            on_offer=self.offers.__setitem__,
        )
        self.pool = self.engine.planner.pool

    def run(self, *messages: object) -> None:
        for message in messages:
            self.engine.submit(message)  # type: ignore[arg-type]
        while self.engine.step():
            pass

    def read(self, ticket: str, first: int = 0, count: int = 99) -> bytes | None:
        found: list[bytes | None] = []
        self.run(ReadBlocks(ticket, first, count, found.append))
        return found[0]


def test_one_token_more_than_the_blocks_hold_is_not_counted() -> None:
    """It is computed so that the last block can be a hit."""
    rig = Rig(blocks=64)
    rig.run(prompt("one", 17))
    rig.run(msgspec.structs.replace(prompt("one", 17), id="again", lend="again"))
    one, again = rig.offers["one"], rig.offers["again"]
    assert one is not None
    assert again is not None
    assert (one.computed, again.computed) == (16, 0)
    assert one.keys == again.keys


def prompt(name: str, tokens: int = 16) -> Generate:
    return request(name, tokens, 1, lend=name)


def test_leased_blocks_are_not_evicted_and_come_back() -> None:
    rig = Rig()
    rig.run(prompt("one"))
    offer = rig.offers["one"]
    assert offer is not None
    assert len(offer.keys) == 4
    assert offer.computed == 16
    assert rig.pool.used == 4
    content = rig.read("one")
    for number in range(5):  # each fills what is left of the cache
        rig.run(request(f"flood{number}", 12, 2))
    assert rig.pool.lookup(offer.keys) != []
    assert rig.read("one") == content
    rig.run(GiveBack("one"))
    assert rig.pool.used == 0
    rig.engine.planner.check()
    rig.run(request("last", 28, 2))
    assert rig.pool.lookup(offer.keys) == [], "given back, they are evicted like others"


def test_a_prompt_waits_for_leased_blocks_and_gets_them() -> None:
    """Nothing hangs: the lease's end lets it in."""
    rig = Rig()
    rig.run(prompt("one"))
    rig.run(request("large", 20, 1))
    assert not any(output.finish for news in rig.news for output in news.outputs if output.id == "large")
    rig.now += 5 * SECOND
    rig.run()
    assert any(output.finish == "length" for news in rig.news for output in news.outputs if output.id == "large")
    assert rig.offers["one"] is None
    rig.engine.planner.check()


def test_no_more_than_half_of_the_pool_is_leased() -> None:
    rig = Rig(blocks=12)
    rig.run(prompt("one"), prompt("two"))
    assert rig.offers["one"] is not None
    assert rig.offers["two"] is None
    rig.run(GiveBack("one"), prompt("three"))
    assert rig.offers["three"] is not None
    rig.run(GiveBack("three"))
    rig.engine.planner.check()


def test_a_lease_ends_by_itself() -> None:
    rig = Rig()
    rig.run(prompt("one"))
    rig.now += 5 * SECOND
    rig.run()
    assert rig.offers["one"] is None
    assert rig.read("one") is None
    assert rig.pool.used == 0
    rig.engine.planner.check()


@pytest.mark.parametrize("what", ["scopes", "labels", "keys"])
def test_a_purge_ends_a_lease_and_zeroes_its_blocks_at_once(what: str) -> None:
    rig = Rig()
    rig.run(request("one", 16, 1, lend="one", labels=[b"user"], scope=b"mine"))
    offer = rig.offers["one"]
    assert offer is not None
    named = {"scopes": [b"mine"], "labels": [b"user"], "keys": [bytes(offer.keys[0])]}[what]
    rig.run(Purge("p", **{what: named}))
    assert rig.read("one") is None
    assert rig.pool.used == 0
    if what == "keys":
        assert rig.pool.lookup(offer.keys) == []
    else:
        assert not rig.runner.holds(b"mine")
    rig.engine.planner.check()


def test_a_purge_reaches_a_lease_by_the_label_of_whoever_hit_its_blocks() -> None:
    """Its own request bore none: the block does, since somebody else asked about the same content."""
    rig = Rig(blocks=16)
    rig.run(request("one", list(range(16)), 1, lend="one", scope=b"mine"))
    rig.run(request("two", [*range(16), 7], 1, scope=b"mine", labels=[b"user"]))
    offer = rig.offers["one"]
    assert offer is not None
    rig.run(Purge("p", labels=[b"user"]))
    assert rig.read("one") is None, "a purged block must not be handed to another worker"
    assert rig.pool.used == 0
    assert not rig.runner.holds(b"mine")
    assert rig.offers["one"] is None
    rig.engine.planner.check()


def test_a_purge_of_others_leaves_a_lease_alone() -> None:
    rig = Rig()
    rig.run(prompt("one"))
    rig.run(Purge("p", [b"another"], [b"label"], [b"key"]))
    assert rig.read("one") is not None


def test_giving_back_twice_or_what_never_was_harms_nothing() -> None:
    rig = Rig()
    rig.run(prompt("one"))
    rig.run(GiveBack("one"), GiveBack("one"), GiveBack("never"))
    assert rig.read("never") is None
    rig.engine.planner.check()


def test_a_ticket_used_twice_keeps_the_first_lease() -> None:
    rig = Rig(blocks=64)
    rig.run(prompt("one"))
    assert rig.read("one") is not None
    rig.run(request("again", 16, 1, lend="one"))
    assert rig.offers["one"] is None
    rig.run(GiveBack("one"))
    rig.engine.planner.check()
