"""The engine loop: mailbox, thread, failures, receipts, figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.workers.engine.drive import request
from workers.config import EngineConfig
from workers.engine.loop import Engine, RunnerLostError, is_out_of_memory
from workers.engine.plan import RunnerGoneError, SequenceFault, StepPlan, StepResult
from workers.engine.record import SequenceRecord, StepRecord
from workers.engine.testing import FakeRunner, solo
from workers.protocol import Cancel, Drain, Generate, Purge, Purged, SequenceOutput, StepOutputs


class Flaky(FakeRunner):
    """Raises what ``fault(plan)`` returns; ``late`` raises after it has written, as a failed sampler would."""

    fault: Callable[[StepPlan], Exception | None] = staticmethod(lambda plan: None)
    late = False

    def run(self, plan: StepPlan) -> StepResult:
        error = self.fault(plan)
        if error is None:
            return super().run(plan)
        if self.late:
            super().run(plan)
        raise error


class Bench:
    """An engine with everything it says on record. The clock ticks 1 ms at every look."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        clock: Callable[[], int] | None = None,
        spare: Callable[[], bool] = lambda: False,
        **config: Any,
    ):
        self.runner = Flaky(blocks, block_size, vocab=900)
        self.messages: list[StepOutputs] = []
        self.purged: list[Purged] = []
        self.steps: list[StepRecord] = []
        self.records: list[SequenceRecord] = []
        self.fatal: list[BaseException] = []
        self.events: list[str] = []
        self.now = 10**9
        self.engine = Engine(
            EngineConfig(block_size=block_size, **config),
            self.runner,
            blocks=blocks,
            max_context=10_000,
            revision="r",
            eos_ids=[999],
            clock_ns=clock or self.tick,
            on_outputs=self.messages.append,
            on_purged=self.purged.append,
            on_step=self.steps.append,
            on_record=self.records.append,
            on_drained=lambda: self.events.append("drained"),
            on_fatal=self.fatal.append,
            spare=spare,
        )

    def tick(self) -> int:
        self.now += 1_000_000
        return self.now

    def outputs(self) -> Iterator[SequenceOutput]:
        for message in list(self.messages):
            yield from message.outputs

    def last(self) -> dict[tuple[str, int], SequenceOutput]:
        ends = [output for output in self.outputs() if output.finish is not None]
        assert len(ends) == len({(output.id, output.index) for output in ends})
        return {(output.id, output.index): output for output in ends}

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for output in self.outputs() if (output.id, output.index) == (name, index) for t in output.tokens]

    def submit(self, *messages: Generate | Cancel | Purge | Drain) -> None:
        for message in messages:
            self.engine.submit(message)

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.engine.step():
                break
        self.engine.planner.check()


def alone(generate: Generate, index: int = 0) -> list[int]:
    return solo(generate.tokens, generate.max_tokens, (generate.params.seed or 0) + index, vocab=900)


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.002)


def test_one_message_per_step() -> None:
    bench = Bench()
    jobs = [request(f"q{i}", 5, 6, n=2) for i in range(3)]
    bench.submit(*jobs)
    bench.run()
    assert [message.step for message in bench.messages] == list(range(1, len(bench.messages) + 1))
    for job in jobs:
        for index in range(2):
            assert bench.tokens(job.id, index) == alone(job, index)
    assert bench.messages[-1].stats.used_blocks == 0
    assert bench.messages[0].stats.running == 6
    assert bench.messages[0].stats.step_ms > 0


def test_news_without_a_step() -> None:
    """A refusal and a cancel are told at once, under step numbers that go on rising."""
    bench = Bench(blocks=4)
    bench.submit(request("huge", 100, 1))
    assert not bench.engine.step()
    bench.submit(request("q", 4, 9))
    assert bench.engine.step()
    bench.submit(Cancel("q"), Cancel("unknown"))
    assert not bench.engine.step()
    assert [message.step for message in bench.messages] == [1, 2, 3]
    assert {name: last.finish for (name, _), last in bench.last().items()} == {"huge": "error", "q": "cancelled"}
    assert not bench.engine.step()
    assert len(bench.messages) == 3


def test_timings() -> None:
    bench = Bench()
    bench.submit(request("q", 4, 3))
    bench.run()
    timings = bench.last()["q", 0].timings
    assert timings is not None
    assert 0 < timings.received_ns < timings.scheduled_ns < timings.first_token_ns < timings.finished_ns


def test_id_in_use_is_dropped() -> None:
    """The one that runs is not disturbed."""
    bench = Bench()
    job = request("q", 4, 6)
    bench.submit(job, request("q", 9, 2))
    bench.run()
    assert bench.tokens("q") == alone(job)


def test_out_of_memory_costs_the_youngest() -> None:
    bench = Bench()
    bench.submit(*(request(f"q{i}", 4, 6) for i in range(3)))
    bench.engine.step()
    failures = iter([RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), None])
    bench.runner.fault = lambda plan: next(failures, None)
    bench.run()
    assert [bench.last()[f"q{i}", 0].finish for i in range(3)] == ["length", "length", "error"]
    assert bench.last()["q2", 0].error == "overloaded"
    assert bench.tokens("q0") == alone(request("q0", 4, 6))


@pytest.mark.parametrize("late", [False, True])
def test_other_failures_cost_the_step(late: bool) -> None:
    """Who was in the step ends with an error; who waits runs; the poison does not come back."""
    bench = Bench(max_running=2)
    bench.runner.late = late
    bench.runner.fault = lambda plan: (
        ValueError("bad") if any(chunk.sequence.id == "poison" for chunk in plan.chunks) else None
    )
    bench.submit(request("poison", 4, 6), request("beside", 4, 6), request("behind", 4, 6))
    bench.run()
    ends = {name: (last.finish, last.error) for (name, _), last in bench.last().items()}
    assert ends == {"poison": ("error", "internal"), "beside": ("error", "internal"), "behind": ("length", None)}
    assert bench.tokens("behind") == alone(request("behind", 4, 6))


def test_a_named_fault_costs_only_the_named() -> None:
    bench = Bench()
    bench.runner.fault = lambda plan: next(
        (SequenceFault("nan", (c.sequence,)) for c in plan.chunks if c.sequence.id == "poison"), None
    )
    bench.submit(request("poison", 4, 6, n=2), request("beside", 4, 6, n=3))
    bench.run()
    assert {last.error for (name, _), last in bench.last().items() if name == "poison"} == {"internal"}
    for index in range(3):
        assert bench.tokens("beside", index) == alone(request("beside", 4, 6), index)


@pytest.mark.parametrize("late", [False, True])
def test_failure_in_a_step_with_copies(late: bool) -> None:
    """Whether the copies of the failed step were made is unknown: who depends on them is computed again, rightly."""
    bench = Bench()
    bench.runner.late = late
    job = request("q", 6, 8, n=3)
    bench.submit(job, request("other", 4, 30))
    armed = [True]

    def fault(plan: StepPlan) -> Exception | None:
        if plan.copies and armed.pop() if armed else False:
            return SequenceFault("x", tuple(c.sequence for c in plan.chunks if c.sequence.id == "other"))
        return None

    bench.runner.fault = fault
    bench.run()
    assert not armed
    for index in range(3):
        assert bench.tokens("q", index) == alone(job, index)
    assert bench.last()["q", 0].prompt_computed == 6
    assert bench.engine.planner.roster.preemptions == 0


def test_wrong_result_is_a_failure() -> None:
    """A runner that returns too little is treated like one that raises."""
    bench = Bench()

    class Short(FakeRunner):
        def run(self, plan: StepPlan) -> StepResult:
            return StepResult([])

    bench.engine._runner = Short(64, 4)
    bench.submit(request("q", 4, 6))
    bench.run()
    assert bench.last()["q", 0].error == "internal"


def test_a_lost_device_is_fatal() -> None:
    """Three failures in a row end the loop; two and a success in between do not."""
    bench = Bench(max_running=1)
    results: list[Exception | None] = [ValueError(), ValueError(), None, ValueError(), ValueError(), ValueError()]
    bench.runner.fault = lambda plan: results.pop(0)
    bench.submit(*(request(f"q{i}", 4, 1) for i in range(9)))
    with pytest.raises(RunnerLostError, match="3 steps failed in a row") as caught:
        bench.run()
    assert isinstance(caught.value.__cause__, ValueError)
    assert not results


def test_poisoned_requests_in_a_row_cost_nobody_else() -> None:
    """Each step fails for one of five: the device is there, and the others' answers are what they were."""
    bench = Bench(max_running=8)
    bench.runner.fault = lambda plan: next(
        (SequenceFault("nan", (c.sequence,)) for c in plan.chunks if c.sequence.id.startswith("poison")), None
    )
    bench.submit(request("beside", 4, 6), *(request(f"poison{number}", 4, 6) for number in range(5)))
    bench.run()
    assert bench.tokens("beside") == alone(request("beside", 4, 6))
    assert all(bench.last()[f"poison{number}", 0].error == "internal" for number in range(5))


def test_memory_for_one_of_many_lets_that_one_finish() -> None:
    """A step that is too large is made smaller until it fits, however often that takes."""
    bench = Bench(max_running=8)
    bench.runner.fault = lambda plan: RuntimeError("CUDA out of memory.") if len(plan.chunks) > 1 else None
    bench.submit(*(request(f"q{number}", 4, 6) for number in range(6)))
    bench.run()
    assert bench.tokens("q0") == alone(request("q0", 4, 6))
    assert {bench.last()[f"q{number}", 0].error for number in range(1, 6)} == {"overloaded"}


def test_memory_that_is_gone_is_fatal() -> None:
    bench = Bench(max_running=1)
    bench.runner.fault = lambda plan: MemoryError()
    bench.submit(*(request(f"q{number}", 4, 6) for number in range(6)))
    with pytest.raises(RunnerLostError, match="3 steps failed in a row"):
        bench.run()


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("x"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) is memory


def test_purge_receipts() -> None:
    """security 15: the first receipt says how much is pending, the second that nothing of it is left."""
    bench = Bench(block_size=2)
    bench.submit(request("done", 9, 4, scope=b"a"))
    bench.run()
    bench.submit(request("busy", 7, 9, scope=b"a", n=2), request("other", 8, 20, scope=b"b"))
    bench.engine.step()
    bench.submit(Purge("p", [b"a"]))
    bench.engine.step()
    first = bench.purged[0]
    assert first.id == "p"
    assert first.pending == 4
    assert first.blocks > 0
    bench.run()
    assert [receipt.pending for receipt in bench.purged] == [4, 0]
    assert bench.purged[1].blocks > first.blocks + 4
    assert bench.runner.holds(b"a") == 0
    assert bench.runner.holds(b"b") > 0
    bench.submit(Purge("again", [b"a"]))
    bench.run()
    assert bench.purged[2] == Purged("again", 0, 0)


def test_drain() -> None:
    bench = Bench()
    bench.submit(request("q", 4, 6), Drain(), request("late", 4, 6))
    bench.engine.step()
    assert bench.events == []
    assert bench.last()["late", 0].error == "draining"
    bench.run()
    assert bench.last()["q", 0].finish == "length"
    assert bench.events == ["drained"]


def test_records() -> None:
    """Steps and sequences tell telemetry the same story."""
    bench = Bench(max_step_tokens=8)
    bench.submit(request("q", 20, 5, trace={"traceparent": "00-aa-bb-01"}))
    bench.run()
    (record,) = bench.records
    assert record.trace == {"traceparent": "00-aa-bb-01"}
    assert [chunk.tokens for chunk in record.chunks] == [8, 8, 4]
    assert [chunk.step for chunk in record.chunks] == [1, 2, 3]
    assert [phase.kind for phase in record.phases] == ["prefill", "decode"]
    prefill, decode = record.phases
    assert (prefill.tokens, prefill.chunks, decode.tokens) == (20, 3, 5)
    assert prefill.start_ns < prefill.end_ns <= decode.start_ns < decode.end_ns <= record.finished_ns
    assert [(step.prefill_tokens, step.decode_tokens, step.batch) for step in bench.steps] == [
        (8, 0, 1), (8, 0, 1), (4, 0, 1), (0, 1, 1), (0, 1, 1), (0, 1, 1), (0, 1, 1)
    ]  # fmt: skip
    assert all(0 < step.run_ns < step.end_ns - step.start_ns for step in bench.steps)
    assert bench.steps[0].ids == ["q"]
    assert bench.steps[0].kv_used == 5 / 64


def test_thread() -> None:
    """Submitted from many threads: every request gets its tokens and one last output; the idle thread sleeps."""
    looks = [0]

    def clock() -> int:
        looks[0] += 1
        return time.time_ns()

    bench = Bench(blocks=30, max_running=8, clock=clock)
    bench.engine.start()
    with pytest.raises(RuntimeError, match="runs already"):
        bench.engine.start()
    jobs = [request(f"q{i}", 3 + i % 9, 1 + i % 7, n=1 + i % 2) for i in range(120)]
    senders = [threading.Thread(target=bench.submit, args=jobs[i::4]) for i in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    total = sum(job.n for job in jobs)
    wait(lambda: sum(output.finish is not None for output in bench.outputs()) == total)
    for job in jobs:
        for index in range(job.n):
            assert bench.tokens(job.id, index) == alone(job, index)
    before = looks[0]
    wait(lambda: any(message.step == 0 for message in bench.messages))
    assert looks[0] - before < 10
    assert bench.messages[-1].stats.used_blocks == 0
    bench.engine.stop()
    assert bench.fatal == []


def test_what_can_wait_is_done_while_nothing_else_is_to_do() -> None:
    """It begins after an idle second, and whoever comes waits for one bit of it only, however much there is."""
    bits, endless = [0], [True]

    def spare() -> bool:
        bits[0] += 1
        return endless[0]

    bench = Bench(clock=time.time_ns, spare=spare)
    bench.engine.start()
    wait(lambda: bits[0] > 2)
    assert [message.step for message in bench.messages] == [0]
    bench.submit(request("q", 4, 3))
    wait(lambda: len(bench.tokens("q")) == 3)
    endless[0] = False
    wait(lambda: bench.messages[-1].step == 0)
    bench.engine.stop()
    assert bench.fatal == []


def test_stop_ends_what_is_unfinished() -> None:
    bench = Bench(clock=time.time_ns)
    bench.engine.start()
    bench.submit(request("q", 4, 200, n=2))
    wait(lambda: any(output.tokens for output in bench.outputs()))
    bench.engine.stop()
    ends = bench.last()
    assert set(ends) == {("q", 0), ("q", 1)}
    assert {last.finish for last in ends.values()} <= {"error", "length"}
    assert len(bench.engine.planner) == 0


def test_a_runner_that_is_gone_is_fatal_at_once() -> None:
    """A rank of several devices ended: whatever ran gets no made-up answer, and nothing is tried again."""
    bench = Bench(max_running=1)
    bench.runner.fault = lambda plan: RunnerGoneError("rank 1 ended")
    bench.submit(request("q", 4, 4))
    with pytest.raises(RunnerLostError, match="rank 1 ended"):
        bench.run()
    assert bench.last() == {}


def test_stop_without_a_thread() -> None:
    bench = Bench()
    bench.submit(request("q", 4, 200))
    bench.engine.step()
    bench.engine.stop()
    assert bench.last()["q", 0].error == "draining"


def test_fatal_in_the_thread() -> None:
    """The thread's end is told once, with its cause, and nobody gets a made-up last output."""
    bench = Bench(max_running=1, clock=time.time_ns)
    bench.runner.fault = lambda plan: ValueError("gone")
    bench.submit(*(request(f"q{i}", 4, 4) for i in range(5)))
    bench.engine.start()
    wait(lambda: bool(bench.fatal))
    assert isinstance(bench.fatal[0], RunnerLostError)
    bench.engine.stop()
    assert len(bench.fatal) == 1
    assert len(bench.last()) == 2
