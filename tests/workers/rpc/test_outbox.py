"""What a slow reader gets is the sum of what a fast one would have got, and it stays bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.protocol import (
    FinishReason,
    Hello,
    Purged,
    SequenceOutput,
    StepOutputs,
    Timings,
    TokenLogprob,
    WorkerStats,
    decode_up,
)
from workers.rpc.outbox import Outbox, frames


def box(**choices: int) -> Outbox:
    made = Outbox(lambda: None)
    made.open()
    for request_id, count in choices.items():
        assert made.register(request_id, count)
    return made


def step(number: int, *outputs: SequenceOutput, free: int = 0) -> StepOutputs:
    return StepOutputs(number, list(outputs), WorkerStats(free_blocks=free))


def token(
    request_id: str, value: int, count: int, finish: FinishReason | None = None, index: int = 0
) -> SequenceOutput:
    timings = Timings(finished_ns=9) if finish else None
    return SequenceOutput(
        request_id, index, [value], output_tokens=count, prompt_computed=count, finish=finish, timings=timings
    )


def test_a_step_that_is_taken_at_once_is_passed_on_as_it_is() -> None:
    outbox = box(a=1)
    sent = step(3, token("a", 7, 1), free=5)
    outbox.put(sent)
    assert outbox.take() == [sent]
    assert outbox.take() == []


def test_a_thread_that_is_late_takes_nothing_of_the_next_session() -> None:
    outbox = Outbox(lambda: None)
    ended = outbox.open()
    outbox.close()
    later = outbox.open()
    assert outbox.register("a", 1)
    sent = step(1, token("a", 7, 1))
    outbox.put(sent)
    assert outbox.take(ended) == []
    assert outbox.take(later) == [sent]


def test_steps_are_merged_while_nobody_reads() -> None:
    outbox = box(a=1, b=2)
    outbox.put(step(1, token("a", 1, 1), token("b", 10, 1), free=9))
    outbox.put(step(2, token("a", 2, 2, "length"), token("b", 20, 1, index=1), free=8))
    outbox.put(step(3, token("b", 11, 2), free=7))
    outbox.put(step(0, free=6))
    [message] = outbox.take()
    assert isinstance(message, StepOutputs)
    assert (message.step, message.stats.free_blocks) == (3, 6)
    merged = {(output.id, output.index): output for output in message.outputs}
    assert merged["a", 0].tokens == [1, 2]
    assert merged["a", 0].finish == "length"
    assert merged["a", 0].timings == Timings(finished_ns=9)
    assert (merged["b", 0].tokens, merged["b", 0].output_tokens) == ([10, 11], 2)
    assert merged["b", 1].tokens == [20]


def test_what_a_search_took_is_never_lost() -> None:
    outbox = box(a=1)
    for number, searched in enumerate((4, 12, 8), 1):
        outbox.put(step(number, SequenceOutput("a", searched=searched)))
    [message] = outbox.take()
    assert isinstance(message, StepOutputs)
    assert [output.searched for output in message.outputs] == [12]


def test_text_and_logprobs_are_concatenated() -> None:
    outbox = box(a=1)
    first, second = TokenLogprob(1, -0.5), TokenLogprob(2, -0.25, [(2, -0.25)])
    outbox.put(step(1, SequenceOutput("a", text="Hel", output_tokens=1, logprobs=[first])))
    outbox.put(step(2, SequenceOutput("a", output_tokens=1)))
    outbox.put(step(3, SequenceOutput("a", text="lo", output_tokens=2, logprobs=[second])))
    [message] = outbox.take()
    assert isinstance(message, StepOutputs)
    assert message.outputs[0].text == "Hello"
    assert message.outputs[0].logprobs == [first, second]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.booleans()), max_size=60), st.data())
def test_whatever_the_reader_misses_the_sum_is_the_same(
    events: list[tuple[str, int, bool]], data: st.DataObject
) -> None:
    outbox = box(a=2, b=2, c=2)
    expected: dict[tuple[str, int], list[int]] = {}
    ended: set[tuple[str, int]] = set()
    read: dict[tuple[str, int], list[int]] = {}
    finished: list[tuple[str, int]] = []

    def take() -> None:
        for message in outbox.take():
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                key = (output.id, output.index)
                assert key not in finished, "nothing follows an end"
                read.setdefault(key, []).extend(output.tokens)
                assert output.output_tokens == len(read[key])
                if output.finish:
                    finished.append(key)

    for number, (name, index, end) in enumerate(events, 1):
        key = (name, index)
        if key in ended:
            continue
        expected.setdefault(key, []).append(number)
        if end:
            ended.add(key)
        outbox.put(step(number, token(name, number, len(expected[key]), "stop" if end else None, index)))
        if data.draw(st.booleans()):
            take()
    take()
    assert read == expected
    assert sorted(finished) == sorted(ended)


def test_it_holds_one_entry_per_sequence_however_long_nobody_reads() -> None:
    outbox = box(a=1)
    for number in range(1, 5001):
        outbox.put(step(number, token("a", number, number)))
    [message] = outbox.take()
    assert isinstance(message, StepOutputs)
    assert len(message.outputs) == 1
    assert message.outputs[0].tokens == list(range(1, 5001))


def test_it_wakes_the_writer_once_until_it_is_emptied() -> None:
    wakes: list[int] = []
    outbox = Outbox(lambda: wakes.append(1))
    outbox.open()
    outbox.put(step(1))
    outbox.put(step(2))
    outbox.put_receipt(Purged("p", 1))
    assert len(wakes) == 1
    outbox.take()
    outbox.put_receipt(Purged("p", 2))
    assert len(wakes) == 2


def test_outputs_of_an_ended_session_never_reach_the_next() -> None:
    outbox = box(a=2, b=1)
    outbox.put(step(1, token("a", 1, 1)))
    assert sorted(outbox.close()) == ["a", "b"]
    outbox.put(step(2, token("a", 2, 2, "cancelled"), token("b", 1, 1)))
    assert outbox.orphans == 2
    outbox.open()
    assert not outbox.register("b", 1), "the engine still runs the old one"
    outbox.put(step(3, token("a", 1, 1, "cancelled", index=1), token("b", 2, 2, "cancelled")))
    assert outbox.orphans == 0
    assert [output for message in outbox.take() if isinstance(message, StepOutputs) for output in message.outputs] == []
    assert outbox.register("b", 1)
    outbox.put(step(4, token("b", 5, 1)))
    [message] = outbox.take()
    assert isinstance(message, StepOutputs)
    assert message.outputs[0].tokens == [5]


def test_an_id_that_is_running_is_not_registered_twice() -> None:
    outbox = box(a=1)
    assert not outbox.register("a", 1)
    assert outbox.live == ["a"]


def test_without_a_session_nothing_is_kept() -> None:
    outbox = Outbox(lambda: None)
    outbox.put(step(1))
    outbox.put_receipt(Purged("p", 1))
    outbox.open()
    assert outbox.take() == []


def test_a_merged_step_that_outgrew_a_frame_is_cut_into_several() -> None:
    outputs = [SequenceOutput(f"r{number}", tokens=list(range(1000))) for number in range(9)]
    cut = frames(StepOutputs(4, outputs, WorkerStats()), limit=8192)
    assert len(cut) > 1
    assert all(len(frame) <= 8192 for frame in cut)
    messages = [decode_up(frame) for frame in cut]
    assert [output for message in messages if isinstance(message, StepOutputs) for output in message.outputs] == outputs
    assert {message.step for message in messages if isinstance(message, StepOutputs)} == {4}
    hello = Hello(1, "w" * 10000, "m", "r", "t", 16, 1, 1, 1)
    assert len(frames(hello, limit=100)) == 1
