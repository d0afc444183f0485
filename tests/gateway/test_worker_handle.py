"""The gateway's figures of one worker: what is in flight, what is owed, what is free, and how old that is."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.worker_handle import LossKind, WorkerGoneError, WorkerHandle, WorkerLoss, WorkerState
from workers.protocol import (
    Cancel,
    Down,
    FinishReason,
    Generate,
    Hello,
    Purge,
    Purged,
    SequenceOutput,
    StepOutputs,
    WorkerStats,
)
from workers.rpc import LinkError

HELLO = Hello(1, "w", "m", "rev", "sha", block_size=16, blocks=100, max_running=8, max_context=4096)


class Line:
    """Records what is sent; may be broken."""

    def __init__(self) -> None:
        self.sent: list[Down] = []
        self.broken = False

    def send(self, message: Down) -> None:
        if self.broken:
            raise LinkError("the session has ended")
        self.sent.append(message)

    def flush(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fixture:
    def __init__(self) -> None:
        self.clock = Clock()
        self.line = Line()
        self.handle = WorkerHandle(
            "m/p-0", model="m", pool="p", labels={"hardware": "cpu"}, incarnation=1, clock=self.clock
        )

    def ready(self) -> WorkerHandle:
        self.handle.opened(self.line, HELLO)
        return self.handle

    def report(self, *outputs: SequenceOutput, step: int = 1, stats: WorkerStats | None = None) -> None:
        self.handle.received(StepOutputs(step, list(outputs), stats or WorkerStats(free_blocks=100)))


@pytest.fixture
def made() -> Fixture:
    return Fixture()


def out(
    request_id: str, produced: int, *, index: int = 0, finish: FinishReason | None = None, error: str | None = None
) -> SequenceOutput:
    return SequenceOutput(
        request_id, index, output_tokens=produced, prompt_computed=10 if produced else 0, finish=finish, error=error
    )


def test_before_hello_nothing_can_be_sent(made: Fixture) -> None:
    handle = made.handle
    assert handle.state is WorkerState.LOADING
    assert not handle.available(100.0)
    with pytest.raises(WorkerGoneError, match="loading"):
        handle.send(Generate("a", [1], 1))


def test_what_is_sent_is_in_flight_until_every_choice_ended(made: Fixture) -> None:
    handle = made.ready()
    handle.send(Generate("a", list(range(10)), 5, n=2))
    assert (handle.inflight, handle.inflight_tokens, handle.inflight_ids) == (2, 10 + 2 * 5, ("a",))
    made.report(out("a", 2), out("a", 1, index=1))
    assert (handle.inflight, handle.inflight_tokens) == (2, 3 + 4)
    made.report(out("a", 5, finish="length"))
    assert (handle.inflight, handle.inflight_tokens) == (1, 4)
    handle.send(Cancel("a"))
    assert handle.inflight == 1, "the slot is busy until the worker says so"
    made.report(out("a", 1, index=1, finish="cancelled"))
    assert (handle.inflight, handle.inflight_tokens, handle.inflight_ids) == (0, 0, ())


def test_a_second_end_or_an_unknown_request_changes_nothing(made: Fixture) -> None:
    handle = made.ready()
    handle.send(Generate("a", [1], 5, n=2))
    for _ in range(3):
        made.report(out("a", 5, finish="stop"), out("ghost", 1, finish="stop"))
    assert handle.inflight == 1


def test_blocks_that_are_promised_are_not_free(made: Fixture) -> None:
    handle = made.ready()
    assert handle.view(100.0).free_blocks == 100
    handle.send(Generate("a", list(range(64)), 50))
    assert handle.view(100.0).free_blocks == 95, "64 tokens and a first one of output are 5 blocks of 16"
    made.report(stats=WorkerStats(free_blocks=90, cached_blocks=10))
    assert handle.view(100.0).free_blocks == 95, "the worker has not seen it yet"
    half = SequenceOutput("a", prompt_computed=30, prompt_cached=2)
    made.report(half, stats=WorkerStats(free_blocks=80, cached_blocks=15, used_blocks=5))
    assert handle.view(100.0).free_blocks == 95, "now its blocks are in the worker's figures: not counted twice"
    assert handle.inflight_tokens == 32 + 50


def test_the_view_says_how_old_it_is(made: Fixture) -> None:
    handle = made.ready()
    assert handle.view(100.5).stale_s == 0.5
    assert not handle.is_stale(102.0)
    assert handle.is_stale(102.1)
    made.clock.now = 110.0
    made.report(step=0, stats=WorkerStats(free_blocks=7, hot_prefixes=[b"k"]))
    view = handle.view(110.0)
    assert (view.stale_s, view.free_blocks, view.hot_prefixes) == (0.0, 7, {b"k"})
    assert (view.max_running, view.total_blocks, view.block_size, dict(view.labels)) == (
        8,
        100,
        16,
        {"hardware": "cpu"},
    )


def test_the_slots_are_those_of_the_last_report(made: Fixture) -> None:
    """A worker with ``max_running: auto`` says from step to step how many may run."""
    handle = made.ready()
    assert handle.view(100.0).max_running == HELLO.max_running
    made.report(stats=WorkerStats(free_blocks=100, max_running=31))
    assert handle.view(100.0).max_running == 31


def test_an_id_in_flight_is_not_sent_twice(made: Fixture) -> None:
    handle = made.ready()
    handle.send(Generate("a", [1], 1))
    with pytest.raises(ValueError, match="already in flight"):
        handle.send(Generate("a", [1], 1))


def test_what_cannot_be_sent_is_not_in_flight(made: Fixture) -> None:
    handle = made.ready()
    made.line.broken = True
    with pytest.raises(WorkerGoneError, match="ended"):
        handle.send(Generate("a", [1], 1))
    assert handle.inflight == 0


def test_a_lost_worker_says_what_it_had_and_what_it_was_computing(made: Fixture) -> None:
    handle = made.ready()
    for name in ("a", "b", "c"):
        handle.send(Generate(name, [1], 9))
    made.report(out("b", 1), out("a", 9, finish="length"))
    loss = handle.closed(WorkerLoss(LossKind.SIGNALLED, signal=9))
    assert (loss.inflight, loss.computing, loss.signal) == (("b", "c"), {"b"}, 9)
    assert loss.suspicious
    assert handle.state is WorkerState.DOWN
    assert (handle.inflight, handle.inflight_tokens) == (0, 0)
    with pytest.raises(WorkerGoneError):
        handle.send(Cancel("b"))


def test_a_stall_is_work_without_a_step(made: Fixture) -> None:
    handle = made.ready()
    made.clock.now += 100
    assert handle.stalled_s() == 0.0, "idle is no stall"
    handle.send(Generate("a", [1], 9))
    made.clock.now += 3
    made.report(step=0)
    assert handle.stalled_s() == 3, "an idle report is no step"
    made.report(step=1)
    assert handle.stalled_s() == 0.0
    made.clock.now += 2
    made.report(out("a", 9, finish="length"), step=2)
    assert handle.stalled_s() == 0.0


def test_gateway_e3_mistakes_of_callers_never_set_a_worker_aside(made: Fixture) -> None:
    """gateway E3: one tenant's malformed requests open the breaker for everybody."""
    handle = made.ready()
    for number in range(50):
        handle.send(Generate(f"r{number}", [1], 1))
        code = ("prompt_too_long", "bad_request")[number % 2]
        made.report(out(f"r{number}", 0, finish="error", error=code))
        assert handle.available(made.clock.now)


def test_gateway_e5_a_worker_that_refuses_everything_is_set_aside(made: Fixture) -> None:
    """gateway E5."""
    handle = made.ready()
    sent = 0
    for number in range(100):
        made.clock.now += 0.05
        if handle.available(made.clock.now):
            handle.send(Generate(f"r{number}", [1], 1))
            sent += 1
            made.report(out(f"r{number}", 0, finish="error", error="overloaded"))
    assert sent <= 5 + 3
    made.clock.now += 60
    handle.send(Generate("probe", [1], 1))
    made.report(out("probe", 1))
    assert handle.available(made.clock.now)


def test_a_worker_that_says_it_drains_gets_nothing_more(made: Fixture) -> None:
    handle = made.ready()
    handle.send(Generate("a", [1], 1))
    made.report(out("a", 0, finish="error", error="draining"))
    assert handle.state is WorkerState.DRAINING
    assert not handle.available(made.clock.now)
    with pytest.raises(WorkerGoneError, match="draining"):
        handle.send(Generate("b", [1], 1))
    handle.send(Cancel("a"))


async def test_a_purge_waits_for_its_receipt(made: Fixture) -> None:
    handle = made.ready()
    purging = asyncio.create_task(handle.purge(Purge(id="", scopes=[b"s"])))
    await asyncio.sleep(0)
    [message] = made.line.sent
    assert isinstance(message, Purge)
    handle.purged(Purged("somebody else's", 9))
    handle.purged(Purged(message.id, 3))
    assert await purging == Purged(message.id, 3)


async def test_security_15_a_purge_with_blocks_in_use_gives_two_receipts(made: Fixture) -> None:
    """security 15: pending first, complete later, never a bare yes."""
    handle = made.ready()
    complete: list[Purged] = []
    purging = asyncio.create_task(handle.purge(Purge(id="", scopes=[b"s"]), on_complete=complete.append))
    await asyncio.sleep(0)
    [message] = made.line.sent
    assert isinstance(message, Purge)
    handle.purged(Purged(message.id, 3, pending=2))
    assert (await purging).pending == 2
    assert complete == []
    for _ in range(2):
        handle.purged(Purged(message.id, 5))
    assert complete == [Purged(message.id, 5)]


async def test_a_purge_ends_with_its_worker(made: Fixture) -> None:
    handle = made.ready()
    purging = asyncio.create_task(handle.purge(Purge(id="", scopes=[b"s"])))
    await asyncio.sleep(0)
    handle.closed(WorkerLoss(LossKind.DISCONNECTED))
    with pytest.raises(WorkerGoneError, match="lost"):
        await purging
    with pytest.raises(WorkerGoneError):
        await handle.purge(Purge(id="", scopes=[b"s"]))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 12), st.booleans()), max_size=80))
def test_gateway_b5_the_figures_never_drift(events: list[tuple[int, int, int, bool]]) -> None:
    """gateway B5: in-flight figures equal the worker's own at all times and are zero at rest."""
    made = Fixture()
    handle = made.ready()
    open_choices: dict[str, set[int]] = {}
    for number, (which, index, produced, end) in enumerate(events):
        name = f"r{which}"
        if name not in open_choices:
            handle.send(Generate(name, list(range(which * 7 + 1)), 10, n=3))
            open_choices[name] = {0, 1, 2}
        made.report(out(name, produced, index=index, finish="stop" if end else None), step=number + 1)
        if end:
            open_choices[name].discard(index)
            if not open_choices[name]:
                del open_choices[name]
        assert handle.inflight == sum(map(len, open_choices.values()))
        assert handle.inflight_tokens >= 0
        assert handle.view(0.0).free_blocks <= 100
    for name, choices in open_choices.items():
        made.report(*[out(name, 10, index=index, finish="length") for index in choices], step=10_000)
    assert (handle.inflight, handle.inflight_tokens, handle.inflight_ids) == (0, 0, ())
    assert handle.view(0.0).free_blocks == 100
