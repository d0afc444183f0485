"""Pools of real worker processes (echo workers): started, watched, replaced, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from gateway.pool import LossKind, Pool, SlotOptions, WorkerGoneError, WorkerHandle, WorkerLoss, WorkerState
from gateway.settings import Launch
from gateway.settings import Pool as PoolConfig
from gateway.worker_slot import backoff_s
from tests.forked import ForkedLauncher
from workers.config import EngineConfig
from workers.launchers.base import LaunchContext, Launcher, LaunchError, WorkerExit, WorkerProcess, WorkerSpec
from workers.launchers.static import StaticLauncher
from workers.protocol import PROTOCOL, Cancel, Generate, Hello, StepOutputs
from workers.rpc import WorkerServer, transport
from workers.testing import Echo, echo_launcher

pytestmark = pytest.mark.timeout(90)
FAST = SlotOptions(step_stall_s=20.0, backoff_s=0.05, max_backoff_s=0.4, check_s=0.05, stop_grace_s=5.0)
IMPATIENT = replace(FAST, step_stall_s=1.5, silence_slack_s=1.5)
Start = Callable[..., Awaitable[Pool]]


class Dispatcher:
    """Records what a pool tells it."""

    def __init__(self) -> None:
        self.ready: list[WorkerHandle] = []
        self.lost: list[tuple[WorkerHandle, WorkerLoss]] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.news = asyncio.Event()
        self.broken = False

    def on_ready(self, handle: WorkerHandle) -> None:
        self.ready.append(handle)
        self.news.set()

    def on_outputs(self, handle: WorkerHandle, outputs: StepOutputs) -> None:
        if self.broken:
            raise RuntimeError("a bug of the dispatcher")
        for output in outputs.outputs:
            self.tokens.setdefault(output.id, []).extend(output.tokens)
            if output.finish:
                self.ends[output.id] = output.error or output.finish
        self.news.set()

    def on_lost(self, handle: WorkerHandle, reason: WorkerLoss) -> None:
        self.lost.append((handle, reason))
        self.news.set()

    async def until(self, wanted: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not wanted():
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def dispatcher() -> Dispatcher:
    return Dispatcher()


@pytest.fixture
async def start(dispatcher: Dispatcher) -> AsyncIterator[Start]:
    pools: list[Pool] = []

    async def make(
        echo: Echo | None = None,
        *,
        count: int = 1,
        launcher: Launcher | None = None,
        options: SlotOptions = FAST,
        ready: bool = True,
        tokenizer: str | None = None,
    ) -> Pool:
        config = PoolConfig(name="p", launch=Launch(count=count), labels={"hardware": "cpu"}, engine=EngineConfig())
        pool = Pool(
            "m",
            "echo",
            config,
            launcher or ForkedLauncher(echo=echo),
            dispatcher,
            options=options,
            tokenizer_sha256=lambda: tokenizer,
        )
        pools.append(pool)
        pool.start()
        if ready:
            await pool.wait_ready(timeout_s=30)
        return pool

    yield make
    for pool in pools:
        await pool.stop()


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_workers_start_serve_and_stop(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(count=2)
    assert sorted(handle.name for handle in pool.ready) == ["m/p-0", "m/p-1"]
    pids = {handle.hello.pid for handle in pool.ready if handle.hello}
    assert len(pids) == 2
    for number, handle in enumerate(pool.ready):
        handle.send(Generate(f"r{number}", [5, 6, 7], 4))
    await dispatcher.until(lambda: len(dispatcher.ends) == 2)
    assert dispatcher.tokens == {"r0": [5, 6, 7, 5], "r1": [5, 6, 7, 5]}
    assert [handle.inflight for handle in pool.ready] == [0, 0]
    shown = pool.snapshot()
    assert [(worker["state"], worker["starts"], worker["labels"]) for worker in shown] == [
        ("ready", 1, {"hardware": "cpu"})
    ] * 2
    assert {worker["pid"] for worker in shown} == pids
    assert all(worker["metrics_port"] > 0 for worker in shown)
    await pool.stop(drain_s=5)
    assert not any(map(alive, pids))
    assert [loss.kind for _, loss in dispatcher.lost] == [LossKind.STOPPED] * 2
    assert pool.ready == []


async def test_a_long_report_is_handed_on_in_parts_and_others_have_their_turn_between(
    start: Start, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 streams of one worker are told of in one message: ``/healthz`` does not wait for all of them."""
    monkeypatch.setattr(transport, "PART", 3)
    sizes: list[int] = []
    turns: list[int] = []
    turn = 0

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    taken = dispatcher.on_outputs

    def on_outputs(handle: WorkerHandle, outputs: StepOutputs) -> None:
        sizes.append(len(outputs.outputs))
        turns.append(turn)
        taken(handle, outputs)

    monkeypatch.setattr(dispatcher, "on_outputs", on_outputs)
    pool = await start(Echo(step_s=0.05))
    [handle] = pool.ready
    counting = asyncio.create_task(count())
    for number in range(20):
        handle.send(Generate(f"r{number}", [5, 6, 7], 4))
    await dispatcher.until(lambda: len(dispatcher.ends) == 20)
    counting.cancel()
    assert all(tokens == [5, 6, 7, 5] for tokens in dispatcher.tokens.values())
    assert max(sizes) == 3, "reports were longer than a part, or this shows nothing"
    for before, after in itertools.pairwise(range(len(sizes))):
        if sizes[before] == 3:
            assert turns[after] > turns[before]
    assert handle.inflight == 0


async def test_a_stop_lets_running_requests_finish(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(Echo(step_s=0.02))
    [handle] = pool.ready
    handle.send(Generate("a", [1], 20))
    await dispatcher.until(lambda: "a" in dispatcher.tokens)
    stopping = asyncio.create_task(pool.stop(drain_s=20))
    await asyncio.sleep(0)
    assert handle.state is WorkerState.DRAINING
    with pytest.raises(WorkerGoneError):
        handle.send(Generate("b", [1], 1))
    await stopping
    assert dispatcher.ends == {"a": "length"}
    assert len(dispatcher.tokens["a"]) == 20
    assert dispatcher.lost[0][1].inflight == ()


async def test_a_stop_does_not_wait_longer_than_it_was_told(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(Echo(step_s=0.05))
    [handle] = pool.ready
    handle.send(Generate("a", [1], 4000))
    await dispatcher.until(lambda: "a" in dispatcher.tokens)
    await pool.stop(drain_s=0.1)
    assert dispatcher.lost[0][1].inflight == ("a",)


async def test_a_killed_worker_is_told_of_and_replaced(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(Echo(step_s=0.02))
    [first] = pool.ready
    assert first.hello is not None
    first.send(Generate("a", [1], 4000))
    first.send(Generate("b", [2], 4000))
    await dispatcher.until(lambda: {"a", "b"} <= dispatcher.tokens.keys())
    os.kill(first.hello.pid, signal.SIGKILL)
    await dispatcher.until(lambda: bool(dispatcher.lost))
    [(handle, loss)] = dispatcher.lost
    assert handle is first
    assert (loss.kind, loss.signal, loss.inflight) == (LossKind.SIGNALLED, 9, ("a", "b"))
    assert loss.computing == {"a", "b"}
    await dispatcher.until(lambda: len(dispatcher.ready) == 2)
    second = dispatcher.ready[1]
    assert (second.name, second.incarnation) == (first.name, 2)
    second.send(Generate("a", [3], 2))
    await dispatcher.until(lambda: "a" in dispatcher.ends)
    assert pool.snapshot()[0]["last_loss"]["signal"] == 9


async def test_security_59_a_request_that_kills_its_worker_can_be_found(start: Start, dispatcher: Dispatcher) -> None:
    """security 59: the loss is suspicious and names what was being computed."""
    pool = await start(Echo(poison=666))
    pool.ready[0].send(Generate("poison", [1, 666], 5))
    await dispatcher.until(lambda: bool(dispatcher.lost))
    loss = dispatcher.lost[0][1]
    assert loss.suspicious
    assert loss.inflight == ("poison",)


async def test_a_worker_that_makes_no_step_is_killed_and_replaced(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(Echo(stall_after=3), options=IMPATIENT)
    [handle] = pool.ready
    assert handle.hello is not None
    handle.send(Generate("a", [1], 100))
    await dispatcher.until(lambda: bool(dispatcher.lost))
    [(_, loss)] = dispatcher.lost
    assert (loss.kind, loss.inflight) == (LossKind.STALLED, ("a",))
    assert len(dispatcher.tokens["a"]) == 3
    await dispatcher.until(lambda: len(dispatcher.ready) == 2)
    assert not alive(handle.hello.pid)


async def test_a_frozen_worker_with_work_is_killed_and_replaced(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(Echo(step_s=0.02), options=IMPATIENT)
    [handle] = pool.ready
    assert handle.hello is not None
    handle.send(Generate("a", [1], 4000))
    await dispatcher.until(lambda: "a" in dispatcher.tokens)
    os.kill(handle.hello.pid, signal.SIGSTOP)
    await dispatcher.until(lambda: len(dispatcher.ready) == 2)
    assert dispatcher.lost[0][1].kind is LossKind.STALLED
    assert not alive(handle.hello.pid)


async def test_a_frozen_worker_without_work_is_killed_and_replaced_too(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(options=IMPATIENT)
    [handle] = pool.ready
    assert handle.hello is not None
    os.kill(handle.hello.pid, signal.SIGSTOP)
    await dispatcher.until(lambda: len(dispatcher.ready) == 2)
    assert "no report" in dispatcher.lost[0][1].detail


async def test_gateway_c13_one_dead_worker_does_not_touch_the_others(start: Start, dispatcher: Dispatcher) -> None:
    """gateway C13."""
    pool = await start(Echo(step_s=0.01), count=2, options=IMPATIENT)
    first, second = pool.ready
    assert first.hello is not None
    os.kill(first.hello.pid, signal.SIGSTOP)
    first.send(Generate("stuck", [1], 10))
    for number in range(5):
        second.send(Generate(f"r{number}", [1], 5))
    await dispatcher.until(lambda: len(dispatcher.ends) == 5)
    assert second.state is WorkerState.READY
    await dispatcher.until(lambda: bool(dispatcher.lost))
    assert dispatcher.lost[0][0] is first
    await pool.stop()  # while what is left of it is being cleared away
    assert not alive(first.hello.pid)


async def test_a_worker_that_cannot_start_is_tried_again_ever_more_slowly(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(Echo(fail_start=True), ready=False)
    async with asyncio.timeout(30):
        while pool.handles[0].incarnation < 3:
            await asyncio.sleep(0.05)
    loss = pool.snapshot()[0]["last_loss"]
    assert (loss["kind"], loss["exit_code"]) == ("start_failed", 3)
    assert "told to fail" in loss["detail"]
    assert dispatcher.ready == []
    assert dispatcher.lost == [], "what was never ready is not lost"
    with pytest.raises(TimeoutError):
        await pool.wait_ready(timeout_s=0.01)


def test_restarts_wait_twice_as_long_each_time_up_to_a_cap() -> None:
    options = SlotOptions(backoff_s=0.25, max_backoff_s=30)
    waits = [backoff_s(failures, options, lambda: 0.999999) for failures in range(1, 12)]
    assert waits[:3] == pytest.approx([0.25, 0.5, 1.0], rel=1e-3)
    assert waits[-1] == pytest.approx(30, rel=1e-3)
    assert waits == sorted(waits)
    assert backoff_s(5, options, lambda: 0.0) == 2.0
    assert backoff_s(10_000, options, lambda: 0.0) == 15


async def test_a_worker_that_is_not_ready_in_time_is_given_up(start: Start, dispatcher: Dispatcher) -> None:
    options = SlotOptions(start_timeout_s=1.5, backoff_s=0.05, check_s=0.05)
    pool = await start(Echo(load_s=60), ready=False, options=options)
    async with asyncio.timeout(30):
        while pool.handles[0].incarnation < 2:
            await asyncio.sleep(0.05)
    assert pool.snapshot()[0]["last_loss"]["detail"] == "not ready within 1.5 s"


async def test_a_worker_of_another_tokenizer_is_refused(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(Echo(tokenizer_sha256="theirs"), tokenizer="ours", ready=False)
    async with asyncio.timeout(30):
        while pool.handles[0].incarnation < 2:
            await asyncio.sleep(0.05)
    loss = pool.snapshot()[0]["last_loss"]
    assert (loss["kind"], dispatcher.ready) == ("protocol", [])
    assert "tokenizer is not the gateway's" in loss["detail"]


class Mixed:
    """Starts workers of different weights."""

    def __init__(self) -> None:
        self._launchers = [ForkedLauncher(echo=Echo(revision=name)) for name in ("one", "two")]

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        return await self._launchers[spec.index].start(spec)


async def test_workers_of_a_pool_are_equal(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(count=2, launcher=Mixed(), ready=False)
    async with asyncio.timeout(30):
        while all(handle.incarnation < 2 for handle in pool.handles):
            await asyncio.sleep(0.05)
    assert len(pool.ready) == 1
    [other] = [worker for worker in pool.snapshot() if worker["starts"] > 1]
    assert "model_revision" in other["last_loss"]["detail"]
    assert "must be equal" in other["last_loss"]["detail"]


class Failing:
    """A launcher that fails, first as it should, then as it should not."""

    def __init__(self) -> None:
        self.calls = 0
        self._launcher = ForkedLauncher()

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        self.calls += 1
        if self.calls == 1:
            raise LaunchError("no such machine")
        if self.calls == 2:
            raise KeyError("a bug of the launcher")
        return await self._launcher.start(spec)


async def test_a_launcher_that_fails_is_tried_again(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(launcher=Failing())
    assert pool.ready[0].incarnation == 3


async def test_a_listener_that_raises_does_not_stop_the_worker(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start()
    [handle] = pool.ready
    dispatcher.broken = True
    handle.send(Generate("a", [1], 3))
    async with asyncio.timeout(30):
        while handle.inflight:
            await asyncio.sleep(0.01)
    dispatcher.broken = False
    handle.send(Generate("b", [1], 3))
    await dispatcher.until(lambda: "b" in dispatcher.ends)
    assert dispatcher.lost == []


async def test_gateway_e5_a_worker_that_refuses_everything_gets_probes_only(
    start: Start, dispatcher: Dispatcher
) -> None:
    """gateway E5: over the real stream."""
    pool = await start(Echo(fail_with="overloaded"))
    [handle] = pool.ready
    for number in range(5):
        handle.send(Generate(f"r{number}", [1], 1))
    await dispatcher.until(lambda: len(dispatcher.ends) == 5)
    assert set(dispatcher.ends.values()) == {"overloaded"}
    assert not handle.available(asyncio.get_running_loop().time())
    assert pool.snapshot()[0]["set_aside"]
    assert handle.state is WorkerState.READY


async def test_cancelled_requests_end_and_free_their_blocks(start: Start, dispatcher: Dispatcher) -> None:
    pool = await start(Echo(step_s=0.01))
    [handle] = pool.ready
    handle.send(Generate("a", list(range(1, 60)), 3000))
    await dispatcher.until(lambda: "a" in dispatcher.tokens)
    handle.send(Cancel("a"))
    await dispatcher.until(lambda: dispatcher.ends.get("a") == "cancelled")
    await dispatcher.until(lambda: handle.stats.used_blocks == 0)
    assert handle.inflight == 0


async def test_a_static_worker_survives_its_gateway_and_takes_it_back(
    start: Start, dispatcher: Dispatcher, tmp_path: os.PathLike[str]
) -> None:
    spec = WorkerSpec("by-hand", 0, "m", "echo")
    process = await echo_launcher().start(spec)
    try:
        static = StaticLauncher(
            LaunchContext(addresses=(process.address,), secret_env="S", env={"S": process.secret or ""})
        )
        pool = await start(launcher=static)
        await pool.stop()
        again = await start(launcher=static)
        again.ready[0].send(Generate("a", [4], 2))
        await dispatcher.until(lambda: "a" in dispatcher.ends)
        assert dispatcher.tokens["a"] == [4, 4]
    finally:
        await process.stop(0)


async def test_gateway_d7_a_static_worker_with_another_secret_is_refused(start: Start, dispatcher: Dispatcher) -> None:
    """gateway D7: and it is said why."""
    process = await echo_launcher().start(WorkerSpec("by-hand", 0, "m", "echo"))
    try:
        launcher = StaticLauncher(
            LaunchContext(addresses=(process.address,), secret_env="S", env={"S": "not this one, sorry"})
        )
        pool = await start(launcher=launcher, ready=False)
        async with asyncio.timeout(30):
            while pool.handles[0].incarnation < 2:
                await asyncio.sleep(0.05)
        assert pool.snapshot()[0]["last_loss"]["kind"] == "refused"
        assert dispatcher.ready == []
    finally:
        await process.stop(0)


async def test_a_worker_of_another_protocol_is_refused_by_its_number(
    start: Start, dispatcher: Dispatcher, tmp_path: os.PathLike[str]
) -> None:
    os.chmod(tmp_path, 0o700)
    server = WorkerServer(f"unix:{tmp_path}/s", lambda message: None)
    await server.start()
    server.ready(Hello(PROTOCOL + 1, "w", "m", "r", "t", 16, 8, 1, 64))
    try:
        pool = await start(launcher=StaticLauncher(LaunchContext(addresses=(server.address,))), ready=False)
        async with asyncio.timeout(30):
            while pool.handles[0].incarnation < 2:
                await asyncio.sleep(0.05)
        assert f"protocol {PROTOCOL + 1}" in pool.snapshot()[0]["last_loss"]["detail"]
    finally:
        await server.stop()


class Lying:
    """A launcher whose processes cannot tell how they ended."""

    def __init__(self) -> None:
        self._launcher = ForkedLauncher()
        self.started = 0

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        process = await self._launcher.start(spec)
        self.started += 1
        if self.started == 1:
            process.wait = self._fail  # type: ignore[method-assign]
        return process

    async def _fail(self) -> WorkerExit:
        raise RuntimeError("a bug of the launcher")


async def test_a_launcher_that_fails_while_its_worker_runs_ends_no_place(start: Start) -> None:
    launcher = Lying()
    pool = await start(launcher=launcher)  # a fast machine sees the first worker ready before its place gives it up
    async with asyncio.timeout(30):
        while launcher.started < 2:
            await asyncio.sleep(0.02)
    await pool.wait_ready(timeout_s=30)
    assert pool.handles[0].incarnation == 2
