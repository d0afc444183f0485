"""A prompt computed by one worker, answered by another: the same tokens whatever becomes of the transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import structlog

from tests.workers.transfer.pair import SIZE, Broken, Direct, Side, both, config, request
from workers.engine.arrivals import Arrived, HandedOver
from workers.engine.record import TransferRecord
from workers.engine.testing import FakeRunner, solo
from workers.protocol import Cancel, Drain, Purge
from workers.transfer import lend
from workers.transfer.connector import Part, TransferError, Wanted
from workers.transfer.fetch import Fetcher

PROMPT = list(range(100, 150))
FULL = (len(PROMPT) - 1) // SIZE * SIZE


class Pair:
    def __init__(self, **decode: object) -> None:
        self.wire = Direct()
        self.prefill = Side(config("prefill"), blocks=256)
        self.decode = Side(config("decode", **decode), self.wire)
        self.wire.source = self.prefill.desk

    async def close(self) -> None:
        await self.decode.close()
        await self.prefill.until(lambda: not self.prefill.engine._handover.leases)
        await self.prefill.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair(transfer={"timeout_s": 30})
    yield made
    await made.close()


def rows(side: Side) -> int:
    assert isinstance(side.runner, FakeRunner)
    return side.runner.rows


async def test_the_decode_worker_computes_only_what_is_left(pair: Pair) -> None:
    """And what the other one computed is told as computed, once."""
    first, second = both(request("r", PROMPT))
    pair.prefill.deliver(first)
    pair.decode.deliver(second)
    last = await pair.decode.ended("r")
    assert pair.decode.tokens["r"] == solo(PROMPT, 6, 0)
    assert rows(pair.decode) == len(PROMPT) - FULL + 5
    assert (last.prompt_computed, last.prompt_cached) == (len(PROMPT), 0)
    assert pair.decode.results == ["ok"]
    ours = await pair.prefill.ended("r")
    assert (ours.prompt_computed, ours.prompt_cached) == (FULL + 1, 0)


async def test_what_the_prefill_worker_had_cached_is_told_as_cached(pair: Pair) -> None:
    pair.prefill.deliver(request("before", PROMPT[:21]))
    await pair.prefill.ended("before")
    first, second = both(request("r", PROMPT))
    pair.prefill.deliver(first)
    pair.decode.deliver(second)
    last = await pair.decode.ended("r")
    assert (last.prompt_computed, last.prompt_cached) == (len(PROMPT) - 20, 20)


async def test_the_reader_may_come_before_the_request(pair: Pair) -> None:
    first, second = both(request("r", PROMPT))
    pair.decode.deliver(second)
    await asyncio.sleep(0.05)
    pair.prefill.deliver(first)
    await pair.decode.ended("r")
    assert pair.decode.results == ["ok"]


async def test_a_record_that_cannot_be_kept_costs_no_request() -> None:
    """Each goes on to the engine once, also where several are let go at once."""
    submitted: list[Arrived | HandedOver] = []

    def broken(record: TransferRecord) -> None:
        raise RuntimeError("no exporter")

    fetcher = Fetcher(
        Broken(), submitted.append, layout="", revision="", block_size=SIZE, block_bytes=1, timeout_s=5, on_end=broken
    )
    for name in ("a", "b"):
        fetcher.take(both(request(name, PROMPT))[1])
    with structlog.testing.capture_logs() as lines:
        fetcher.let_all_go()
    await fetcher.close()
    assert [one.generate.id for one in submitted] == ["a", "b"]
    assert len(fetcher) == 0
    assert [line["event"] for line in lines] == ["transfer_record_lost"] * 2


async def test_many_at_once(pair: Pair) -> None:
    prompts = {f"r{number}": list(range(number, number + 20 + number)) for number in range(8)}
    for name, prompt in prompts.items():
        first, second = both(request(name, prompt), name)
        pair.prefill.deliver(first)
        pair.decode.deliver(second)
    for name, prompt in prompts.items():
        await pair.decode.ended(name)
        assert pair.decode.tokens[name] == solo(prompt, 6, 0)
    assert pair.decode.results == ["ok"] * 8


async def test_choices_share_what_arrived(pair: Pair) -> None:
    first, second = both(request("r", PROMPT, n=3))
    pair.prefill.deliver(first)
    pair.decode.deliver(second)
    last = await pair.decode.ended("r")
    assert (last.prompt_computed, last.prompt_cached) == (len(PROMPT), 0)
    await pair.decode.until(lambda: not pair.decode.engine._handover._arrivals._computed)  # type: ignore[union-attr]


def other_keys(part: Part) -> Part:
    return msgspec.structs.replace(part, keys=[bytes(32)] * len(part.keys))


def cut(part: Part) -> Part:
    return msgspec.structs.replace(part, data=part.data[:-1])


def too_many(part: Part) -> Part:
    return msgspec.structs.replace(part, keys=part.keys * 2, data=part.data * 2)


def empty(part: Part) -> Part:
    return msgspec.structs.replace(part, keys=[], data=b"")


@pytest.mark.parametrize(("spoil", "why"), [(other_keys, "keys"), (cut, "broken"), (too_many, "keys"), (empty, "keys")])
async def test_what_does_not_fit_is_computed_again(pair: Pair, spoil: object, why: str) -> None:
    """Another prompt's blocks, a truncated part, more than the prompt has, nothing at all."""
    pair.wire.spoil = spoil  # type: ignore[assignment]
    first, second = both(request("r", PROMPT))
    pair.prefill.deliver(first)
    pair.decode.deliver(second)
    last = await pair.decode.ended("r")
    assert pair.decode.tokens["r"] == solo(PROMPT, 6, 0)
    assert (last.prompt_computed, last.prompt_cached) == (len(PROMPT), 0)
    assert rows(pair.decode) == len(PROMPT) + 5
    assert pair.decode.results == [why]


async def test_a_lie_about_what_was_computed_bills_no_more_than_the_prompt(pair: Pair) -> None:
    pair.wire.spoil = lambda part: msgspec.structs.replace(part, computed=10**9)
    first, second = both(request("r", PROMPT))
    pair.prefill.deliver(first)
    pair.decode.deliver(second)
    last = await pair.decode.ended("r")
    assert (last.prompt_computed, last.prompt_cached) == (len(PROMPT), 0)


async def test_another_scope_another_prompt_or_another_model_never_fits() -> None:
    """The ticket alone is not enough: the reader's own keys must be those of the blocks."""
    wire = Direct()
    prefill, decode = Side(config("prefill")), Side(config("decode"), wire)
    foreign = Side(config("decode"), wire, revision="other")
    wire.source = prefill.desk
    cases = {
        "scope": (decode, {"scope": b"another"}),
        "prompt": (decode, {"tokens": [1, *PROMPT[1:]]}),
        "adapter": (decode, {"adapter": "digest"}),
        "model": (foreign, {}),
    }
    for name, (side, other) in cases.items():
        mine = request(name, PROMPT, scope=name.encode())
        first, second = both(mine, name)
        prefill.deliver(first)
        changed = msgspec.structs.replace(second, **other)
        if name == "adapter":
            side.desk.takes(changed)
            await side.until(lambda side=side: len(side.results) == 3)  # type: ignore[misc]
            continue
        side.deliver(changed)
        await side.ended(name)
        assert side.tokens[name] == solo(changed.tokens, 6, 0)
    assert decode.results == ["keys"] * 3
    assert foreign.results == ["keys"]
    for side in (decode, foreign):
        await side.close()
    await prefill.until(lambda: not prefill.engine._handover.leases)
    await prefill.close()


async def test_another_layout_is_told_at_once() -> None:
    wire = Direct()
    prefill, decode = Side(config("prefill")), Side(config("decode"), wire, layout="another")
    wire.source = prefill.desk
    first, second = both(request("r", PROMPT))
    decode.deliver(second)
    await decode.ended("r")
    assert decode.results == ["layout"]
    prefill.deliver(first)
    await prefill.ended("r")
    await decode.close()
    await prefill.close(leased=1)


async def test_nobody_there_means_computing_here() -> None:
    decode = Side(config("decode"), Broken())
    decode.deliver(both(request("r", PROMPT))[1])
    await decode.ended("r")
    assert decode.tokens["r"] == solo(PROMPT, 6, 0)
    assert decode.results == ["broken"]
    await decode.close()


async def test_a_connector_that_fails_in_its_own_way_costs_no_request() -> None:
    class Foreign(Broken):
        async def pull(self, source: object, layout: str):  # type: ignore[no-untyped-def, override]
            raise KeyError(layout)
            yield

    decode = Side(config("decode"), Foreign())
    decode.deliver(both(request("r", PROMPT))[1])
    await decode.ended("r")
    assert decode.results == ["broken"]
    await decode.close()


async def test_too_late_means_computing_here_and_the_lease_ends() -> None:
    pair = Pair(transfer={"timeout_s": 0.2})
    pair.wire.hold = asyncio.Event()
    first, second = both(request("r", PROMPT))
    pair.prefill.deliver(first)
    pair.decode.deliver(second)
    await pair.decode.ended("r")
    assert pair.decode.tokens["r"] == solo(PROMPT, 6, 0)
    assert pair.decode.results == ["late"]
    await pair.close()  # which waits for the lease's end


async def test_a_request_that_fails_at_the_prefill_worker_is_run_whole(pair: Pair) -> None:
    """``draining`` stands for all the ways in which it may end without blocks."""
    first, second = both(request("r", PROMPT))
    pair.prefill.deliver(Drain())
    pair.prefill.deliver(first)
    pair.decode.deliver(second)
    await pair.decode.ended("r")
    assert pair.decode.tokens["r"] == solo(PROMPT, 6, 0)
    assert pair.decode.results == ["gone"]


async def test_a_cancel_overtakes_no_request(pair: Pair) -> None:
    """It waits for blocks that never come: cancelled, it ends at once, and once."""
    _, second = both(request("r", PROMPT))
    pair.decode.deliver(second)
    await asyncio.sleep(0.02)
    pair.decode.deliver(Cancel("r"))
    assert (await pair.decode.ended("r")).finish == "cancelled"
    assert pair.decode.results == ["stopped"]


async def test_a_drain_waits_for_no_transfer(pair: Pair) -> None:
    """What came before it is answered whole."""
    _, second = both(request("r", PROMPT))
    pair.decode.deliver(second)
    pair.decode.deliver(Drain())
    assert (await pair.decode.ended("r")).finish == "length"
    assert pair.decode.tokens["r"] == solo(PROMPT, 6, 0)


async def test_a_purge_ends_leases_and_transfers_of_what_it_concerns(pair: Pair) -> None:
    """Not a byte of the scope is left at either worker, and the answer is computed afresh."""
    pair.wire.hold = asyncio.Event()
    for name, scope in (("r", b"purged"), ("other", b"kept")):
        first, second = both(request(name, PROMPT, scope=scope), name)
        pair.prefill.deliver(first)
        pair.decode.deliver(second)
    await pair.prefill.until(lambda: pair.prefill.engine._handover.leases == 2)
    purge = Purge("p", [b"purged"])
    pair.prefill.deliver(purge)
    assert isinstance(pair.prefill.runner, FakeRunner)
    await pair.prefill.until(lambda: not pair.prefill.runner.holds(b"purged"))  # type: ignore[attr-defined]
    assert pair.prefill.runner.holds(b"kept") >= FULL
    assert pair.prefill.engine._handover.leases == 1
    pair.decode.deliver(purge)
    await pair.decode.ended("r")
    pair.wire.hold.set()
    await pair.decode.ended("other")
    assert pair.decode.tokens["r"] == pair.decode.tokens["other"] == solo(PROMPT, 6, 0)
    assert pair.decode.results == ["stopped", "ok"]


async def test_a_second_reader_gets_nothing(pair: Pair) -> None:
    first, second = both(request("r", PROMPT))
    pair.prefill.deliver(first)
    pair.decode.deliver(second)
    await pair.decode.ended("r")
    with pytest.raises(TransferError, match="gone"):
        await anext(pair.prefill.desk.parts(Wanted("ticket", "fake")))


async def test_an_unknown_ticket_waits_a_moment_for_its_request(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend, "UNKNOWN_S", 0.05)
    with pytest.raises(TransferError, match="gone"):
        await anext(pair.prefill.desk.parts(Wanted("no ticket", "fake")))


async def test_a_worker_that_has_not_loaded_its_model_lends_nothing() -> None:
    from workers.transfer.desk import TransferDesk

    with pytest.raises(TransferError, match="gone"):
        await anext(TransferDesk(config("prefill"), None).parts(Wanted("ticket", "fake")))
