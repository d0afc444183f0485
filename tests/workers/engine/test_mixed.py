"""Everything at once, at random: whoever is answered gets the tokens of a run alone, and every step keeps the books."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.workers.engine.drive import Drive, request
from tests.workers.engine.tiered import TieredDrive
from tests.workers.transfer.pair import FakeMover
from workers.engine.arrivals import Arrived, HandedOver
from workers.engine.block_hash import chain_keys
from workers.engine.handover import Handover
from workers.engine.leases import GiveBack, Offer, ReadBlocks
from workers.engine.plan import StepPlan
from workers.engine.sequence import Sequence
from workers.engine.testing import FakeRunner, Slot
from workers.protocol import Beams, Generate, Purge, SamplingParams, SequenceOutput

LONGEST, MOST = 40, 24
SCORED = SamplingParams(seed=0, ignore_eos=True, logprobs=0, prompt_logprobs=True)


class _Loose:
    """Who was preempted may come back behind a younger prompt, and beams differ from a run alone."""

    def bounded(self, plan: StepPlan, running: set[Sequence]) -> None:
        """See above."""

    def compare(self, choice: tuple[str, int], generate: Generate) -> None:
        if generate.beams is None:
            super().compare(choice, generate)  # type: ignore[misc]


class Plain(_Loose, Drive):
    """Without tiers; it may lend blocks to other workers, and get some of them."""

    handover: Handover | None = None

    def lend(self) -> None:
        """From now on."""
        self.offers: dict[str, Offer | None] = {}
        self.handover = Handover(
            self.planner.pool,
            FakeMover(self.runner),
            self.config,
            "rev",
            self.runner.zero_blocks,
            self.offers.__setitem__,
        )

    def take(self, outputs: list[SequenceOutput]) -> None:
        if self.handover is not None:
            outputs = [self.handover.told(output, self.now) for output in outputs]
        super().take(outputs)

    def step(self) -> StepPlan | None:
        if self.handover is not None:
            self.handover.sweep(self.now)
        return super().step()

    def check(self) -> None:
        lent: list[int] = []
        if self.handover is not None and self.handover._leases is not None:
            lent = [block for lease in self.handover._leases._leases.values() for block in lease.blocks]
        self.planner.check(lent)

    def idle(self) -> None:
        if self.handover is not None:
            self.handover.sweep(2**62)
            assert not self.handover.leases
        super().idle()


class Tiered(_Loose, TieredDrive):
    """With tiers."""


class Mixed:
    """One random life of an engine."""

    def __init__(self, seed: int) -> None:
        pick = self.pick = Random(seed)
        self.serial = 0
        self.vocab = pick.choice([2, 3, 900])
        windows = pick.choice([(0,), (0,), (0, 8, 8), (8,), (0, 3), (5,), (1,), (0, 64)])
        config: dict[str, Any] = {
            "block_size": pick.choice([4, 4, 1, 2, 7, 64]),
            "twice_at": pick.choice([0, 0, 5, 50]),
            "max_step_tokens": pick.choice([1, 2, 4, 8, 16, 40]),
            "max_chunk_tokens": pick.choice([None, None, 1, 5]),
            "max_running": pick.choice([1, 2, 4, 8, "auto"]),
            "prefix_cache": pick.random() < 0.8,
            "cache_share": pick.choice([0.0, 1.0]),
            "mode": pick.choice(["continuous", "continuous", "static"]),
        }
        if pick.random() < 0.1:
            config["kv_cache_reuse"] = False
        elif pick.random() < 0.5:
            config["speculation"] = {"method": "ngram", "tokens": pick.choice([1, 5]), "ngram_min": 1}
        worst = Drive(blocks=9999, windows=windows, **config).planner.limits.worst_blocks(LONGEST, MOST)
        config |= {"blocks": worst + pick.choice([0, 1, 5, 20]), "vocab": self.vocab}
        self.public = pick.random() < 0.3
        """Some prompts begin with a public prefix; then nothing is purged, since the runner knows no purged one."""
        self.drive: Plain | Tiered
        hands = config["block_size"] == 4 and config.get("kv_cache_reuse", True) and config["prefix_cache"]
        if windows == (0,) and config.get("kv_cache_reuse", True) and pick.random() < 0.6:
            self.drive = Tiered(slots=pick.choice([2, 12]), files=pick.choice([0, 3, 40]), eager=False, **config)
        else:
            self.drive = Plain(windows=windows, **config)
            if windows == (0,) and hands and pick.random() < 0.7:
                self.drive.lend()

    def live(self, acts: int) -> None:
        """So many acts, then until idle."""
        ways = [self.ask] * 6 + [self.steps] * 9 + [self.cancel, self.purge, self.fail, self.disk, self.hand, self.hand]
        for _ in range(acts):
            self.pick.choice(ways)()
            self.drive.check()
        for _ in range(20_000):
            self.disk()
            if self.drive.step() is None:
                if not self.drive.planner.roster.waiting:
                    break
                self.drive.now += 10**9  # until a lease ends
        self.drive.idle()

    def ask(self) -> None:
        pick, drive = self.pick, self.drive
        self.serial += 1
        length, family = pick.randint(1, LONGEST), pick.randint(0, 2)
        tokens = [token % self.vocab for token in range(family * 100, family * 100 + length)]
        fields: dict[str, Any] = {
            "scope": pick.choice([b"x", b"y"]),
            "labels": pick.choice([[], [b"doc"], [b"user"]]),
            "tenant_key": pick.choice("ab"),
        }
        if self.public:
            fields["public_prefix_tokens"] = pick.randint(0, length)
        most = pick.randint(1, MOST)
        kind = pick.random()
        if kind < 0.15:
            fields["beams"], most = Beams(width=pick.randint(1, 3)), min(most, 6)
        elif kind < 0.3:
            fields["params"] = SCORED
        elif kind < 0.6:
            fields["n"] = pick.randint(2, 4)
        name = f"q{self.serial}"
        if isinstance(drive, Plain) and drive.handover is not None and not self.public:
            if pick.random() < 0.4:
                fields["lend"] = name
            generate = request(name, tokens, most, **fields)
            if pick.random() < 0.4:
                self.arrive(drive, generate)
            drive.handover.expect(generate)
        else:
            generate = request(name, tokens, most, **fields)
        drive.add(generate)

    def arrive(self, drive: Plain, generate: Generate) -> None:
        """Some of its blocks come from elsewhere, in order; some of their bytes are no blocks."""
        assert drive.handover is not None
        size, tokens = 4, generate.tokens
        keys = chain_keys(generate.scope, "rev", None, tokens, size)[: max(0, len(tokens) - 1) // size]
        keys = keys[: self.pick.randint(0, len(keys))]
        if keys:
            other = FakeRunner(len(keys), size)
            for index in range(len(keys)):
                other.slots[index] = [
                    Slot(tokens[at], at, generate.scope, None) for at in range(index * size, (index + 1) * size)
                ]
            data = FakeMover(other).read(list(range(len(keys))))
            data = data if self.pick.random() < 0.8 else data[:-3]
            drive.handover.handle(Arrived(generate, keys, data, 0, lambda more: None))
            drive.handover.handle(HandedOver(generate, self.pick.randint(0, len(keys) * size)))
        drive.check()

    def hand(self) -> None:
        """Somebody reads what is lent, or gives it back."""
        drive, pick = self.drive, self.pick
        if not isinstance(drive, Plain) or drive.handover is None:
            return
        ticket = f"q{self.serial - pick.randint(0, 5)}"
        offer = drive.offers.get(ticket)
        found: list[bytes | None] = []
        drive.handover.handle(ReadBlocks(ticket, 0, pick.randint(1, 9), found.append))
        assert (found[0] is not None) == (offer is not None)
        if pick.random() < 0.5:
            drive.handover.handle(GiveBack(ticket))
        if pick.random() < 0.1:
            drive.handover.sweep(2**62)

    def steps(self) -> None:
        for _ in range(self.pick.randint(1, 8)):
            self.drive.step()

    def cancel(self) -> None:
        self.drive.cancel(f"q{self.serial - self.pick.randint(0, 5)}", self.pick.choice([None, None, 0, 1]))

    def purge(self) -> None:
        if self.public:
            return
        drive = self.drive
        scopes, labels = [b"x"], [b"doc"]
        (scopes if self.pick.random() < 0.5 else labels).clear()
        if isinstance(drive, Plain) and drive.handover is not None:
            drive.handover.purge(Purge("p", scopes, labels))
        ticket = drive.planner.purge(scopes, labels)
        drive.runner.zero_blocks(drive.planner.take_dirty())
        if isinstance(drive, Tiered) and ticket.below is not None:
            drive.desk.carry_out()
            drive.desk.purged(ticket.below)

    def fail(self) -> None:
        """A step that came to nothing, or whose result was lost; somebody may have left meanwhile."""
        drive, pick = self.drive, self.pick
        drive.now += 1
        plan = drive.planner.plan(drive.now)
        if isinstance(drive, Tiered):
            drive.desk.carry_out()
        if plan is None:
            return
        names = [chunk.sequence.id for chunk in plan.chunks]
        if names and pick.random() < 0.3:
            drive.take(drive.planner.cancel(names[0], drive.now, pick.choice([None, 0])))
        if names and pick.random() < 0.5:
            drive.runner.run(plan)
        drive.take(drive.planner.fail(plan, {name for name in names if pick.random() < 0.3}, "internal", drive.now))
        drive.runner.zero_blocks(plan.zero)

    def disk(self) -> None:
        if isinstance(self.drive, Tiered):
            self.drive.work(self.pick.randint(1, 6))
            self.drive.now += self.pick.choice([0, 400_000_000])


@pytest.mark.parametrize("seed", range(40))
def test_a_random_life(seed: int) -> None:
    Mixed(seed).live(60)
