"""Device time: every nanosecond in one kind, every token pays its part, what was computed twice is told apart."""

from __future__ import annotations

import time

import pytest

from tests.workers.engine.test_loop import Bench
from workers.engine.device_time import REPORT_NS, DeviceTime
from workers.engine.plan import Chunk, StepPlan
from workers.engine.sequence import Sequence
from workers.protocol import Generate, SamplingParams, SequenceOutput


def sequence(name: str, high_water: int = 0) -> Sequence:
    return Sequence(name, 0, [1] * 100, 50, 50, SamplingParams(), high_water=high_water)


def end(name: str) -> SequenceOutput:
    return SequenceOutput(name, finish="stop")


def test_a_step_is_shared_by_its_tokens_and_recompute_is_told_apart() -> None:
    device = DeviceTime()
    device.begin(1000)
    device.idle(1500)
    plan = StepPlan(1, [Chunk(sequence("a"), 0, 30), Chunk(sequence("b", high_water=20), 10, 20)])
    device.step(plan, 1500 + 1000)
    device.failed(StepPlan(2, [Chunk(sequence("a"), 30, 1)]), 2800)
    assert {kind: ns for kind, ns in device.kinds.items() if ns} == {
        "computed": 800,
        "recompute": 200,
        "retry": 300,
        "idle": 500,
    }
    assert device.told(end("a")).device_ns == (600, 0, 300)
    assert device.told(end("b")).device_ns == (200, 200, 0)
    assert device.told(end("b")).device_ns is None, "told once"
    assert device.told(SequenceOutput("a")).device_ns is None


def test_moving_blocks_is_told_apart_and_nobodys_tokens_pay_for_it() -> None:
    """issue 5: offload and transfer time apart; what was moved in a wait is not idle, in a failed step not retried."""
    device = DeviceTime()
    device.begin(0)
    device.moved("transfer", 40)
    device.idle(100)
    device.moved("offload", 20)
    device.moved("transfer", 30)
    device.step(StepPlan(1, [Chunk(sequence("a"), 0, 5)]), 200)
    device.moved("offload", 10)
    device.failed(StepPlan(2, [Chunk(sequence("a"), 5, 1)]), 300)
    device.moved("offload", 500)  # clocks differ: never more than has passed
    device.idle(310)
    assert device.kinds == {"computed": 50, "recompute": 0, "retry": 90, "offload": 40, "transfer": 70, "idle": 60}
    assert device.told(end("a")).device_ns == (50, 0, 90)


def test_the_kinds_add_up_to_wall_time_whatever_the_rounding() -> None:
    device = DeviceTime()
    device.begin(7)
    now = 7
    for step in range(1, 200):
        now += 13 * step % 101
        chunks = [Chunk(sequence(f"s{i}", high_water=i * 3), 5, i + 1) for i in range(step % 7)]
        (device.step if step % 3 else device.failed)(StepPlan(step, chunks), now) if chunks else device.idle(now)
    assert sum(device.kinds.values()) == now - 7
    told = [device.told(end(f"s{i}")).device_ns for i in range(6)]
    assert sum(sum(parts) for parts in told if parts) == pytest.approx(now - 7 - device.kinds["idle"], abs=3 * 200 * 7)


def test_the_kinds_are_told_now_and_then() -> None:
    device = DeviceTime()
    assert device.due() == {}
    device.begin(0)
    device.idle(REPORT_NS - 1)
    assert device.due() == {}
    device.idle(REPORT_NS)
    assert device.due()["idle"] == REPORT_NS
    assert device.due() == {}


def test_an_engine_tells_what_its_requests_took() -> None:
    """All choices, a cancelled one and one that fails; the sum is the sum of the steps."""
    bench = Bench(blocks=64)
    engine = bench.engine
    begun = bench.now
    engine.submit(Generate("two", list(range(10)), 6, n=2))
    engine.submit(Generate("one", list(range(50, 60)), 4))
    while engine.step():
        pass
    paid: dict[str, int] = {}
    for message in bench.messages:
        for output in message.outputs:
            if output.device_ns is not None:
                assert output.finish is not None
                paid[output.id] = paid.get(output.id, 0) + sum(output.device_ns)
    assert set(paid) == {"one", "two"}
    assert paid["two"] > paid["one"] > 0
    kinds = engine._device.kinds
    assert kinds["retry"] == kinds["recompute"] == 0
    assert sum(paid.values()) == pytest.approx(kinds["computed"], rel=0.001)
    assert sum(kinds.values()) <= bench.now - begun


def test_the_kinds_of_a_running_engine_add_up_to_wall_time() -> None:
    """issue 5: idle, computing and failed steps together are wall time, within a hundredth; here exactly."""
    seen: list[int] = []

    def clock() -> int:
        seen.append(time.time_ns())
        return seen[-1]

    engine = Bench(blocks=64, clock=clock).engine
    seen.clear()
    engine.start()
    time.sleep(0.3)
    for number in range(20):
        engine.submit(Generate(f"r{number}", list(range(12)), 20))
        time.sleep(0.02)
    time.sleep(0.3)
    engine.stop()
    wall, kinds = seen[-1] - seen[0], engine._device.kinds  # of the engine's thread, which a busy machine may let wait
    assert sum(kinds.values()) == pytest.approx(wall, rel=0.01)
    assert kinds["idle"] > 0.5e9
    assert kinds["computed"] > 0
