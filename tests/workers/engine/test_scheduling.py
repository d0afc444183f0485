"""Budget, order, slots, refusals: scenario by scenario."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.engine.drive import Drive, request
from workers.config import EngineConfig
from workers.engine.plan import Sampled, StepResult
from workers.engine.planner import Planner
from workers.protocol import SamplingParams


def shape(drive: Drive) -> list[list[tuple[str, int]]]:
    return [[(chunk.sequence.id, chunk.count) for chunk in plan.chunks] for plan in drive.plans]


def test_decodes_first_then_prompts() -> None:
    """A running stream gets its token in every step while a long prompt is computed in chunks beside it."""
    drive = Drive(max_step_tokens=8)
    drive.add(request("stream", 4, 12))
    drive.step()
    drive.add(request("long", 30, 2))
    for _ in range(4):
        drive.step()
    assert shape(drive)[1:5] == [[("stream", 1), ("long", 7)]] * 4
    drive.run()
    assert drive.plans[1].chunks[0].is_decode
    assert not drive.plans[1].chunks[1].is_decode


def test_prompts_as_long_as_the_budget_end_one_in_each_step() -> None:
    """Beside decodes too, up to an eighth of the budget; beside more of them nobody ends, so nothing runs over."""
    drive = Drive(max_step_tokens=64, max_running=10, blocks=400)
    drive.add(*(request(f"q{i}", 64, 30) for i in range(10)))
    for _ in range(11):
        drive.step()
    rows = [[chunk.count for chunk in plan.chunks] for plan in drive.plans]
    assert rows == [[1] * i + [64] for i in range(9)] + [[1] * 9 + [55], [1] * 9 + [9]]
    drive.run()


def prompt_rows(drive: Drive) -> list[int]:
    chunks = [chunk for plan in drive.plans for chunk in plan.chunks if chunk.sequence.id == "long"]
    return [chunk.count for chunk in chunks if not chunk.is_decode]


def test_chunks_beside_a_stream_take_equally_long_however_deep() -> None:
    """A token that attends to 100 more takes as long as two at the start: a step beside a stream never takes longer."""
    drive = Drive(max_step_tokens=64, twice_at=100, blocks=400)
    drive.add(request("stream", 4, 30))
    drive.step()
    drive.add(request("long", 400, 2))
    drive.run()
    rows = prompt_rows(drive)
    most, at = 63 * (63 + 2 * 100), 0
    assert rows[0] == 63
    assert rows == sorted(rows, reverse=True)
    for count in rows[:-1]:
        assert count * (count + 2 * (100 + at)) <= most < (count + 1) * (count + 1 + 2 * (100 + at))
        at += count


def test_a_prompt_that_nobody_waits_for_is_counted_in_tokens() -> None:
    drive = Drive(max_step_tokens=64, twice_at=100, blocks=400)
    drive.add(request("long", 400, 2), request("next", 4, 2))
    drive.run()
    assert prompt_rows(drive) == [64] * 6 + [16]


def test_a_prompt_gets_on_however_deep_it_is() -> None:
    drive = Drive(max_step_tokens=9, twice_at=1, blocks=400)
    drive.add(request("stream", 4, 200))
    drive.step()
    drive.add(request("long", 300, 2))
    drive.run()
    assert min(prompt_rows(drive)[1:-1]) == 2, "a quarter of what the stream leaves"


def test_chunk_cap_per_sequence() -> None:
    drive = Drive(max_step_tokens=16, max_chunk_tokens=3)
    drive.add(request("a", 9, 1), request("b", 4, 1))
    drive.run()
    assert shape(drive) == [[("a", 3), ("b", 3)], [("a", 3), ("b", 1)], [("a", 3)]]


def test_no_row_is_planned_twice() -> None:
    """Without preemption and hits every token but the last goes through the model exactly once."""
    drive = Drive(max_step_tokens=8, prefix_cache=False)
    drive.add(*(request(f"q{i}", 5 + i, 6) for i in range(4)))
    drive.run()
    assert drive.runner.rows == sum(5 + i + 5 for i in range(4))
    assert drive.planner.roster.recomputed == 0


def test_more_decodes_than_budget_take_turns() -> None:
    """engine D7: with room for 3 of 8 each sequence gets a token at least every third step."""
    drive = Drive(max_step_tokens=3, blocks=200)
    drive.add(request("q", 3, 30, n=8))
    drive.step()
    assert len(drive.planner.roster.running) == 8
    seen = dict.fromkeys(range(8), 1)
    for _ in range(60):
        plan = drive.step()
        assert plan is not None
        assert plan.tokens == 3
        for chunk in plan.chunks:
            seen[chunk.sequence.index] = len(drive.plans)
        assert max(len(drive.plans) - at for at in seen.values()) <= 3
    drive.run()


def test_every_decode_advances_each_step() -> None:
    """engine D7: nobody skips a step in silence, also while others end, are cancelled or preempted beside it."""
    drive = Drive(blocks=20, block_size=2, max_step_tokens=64, max_running=6)
    drive.add(*(request(f"q{i}", 3, 5 + 3 * i) for i in range(8)))
    for number in range(200):
        before = {s: (s.computed, s.preemptions) for s in drive.planner.roster.running}
        if number == 7:
            drive.cancel("q2")
        if drive.step() is None:
            break
        for sequence, (computed, preemptions) in before.items():
            if sequence.finish is None:
                assert sequence.computed > computed or sequence.preemptions > preemptions
    drive.idle()
    assert drive.planner.roster.preemptions > 0


def test_prompt_that_never_fits_is_refused_at_once() -> None:
    """engine D1: pool + 1 tokens are refused; the short ones behind it finish."""
    drive = Drive(blocks=8, block_size=4)
    drive.add(request("huge", 33, 1))
    assert drive.last["huge", 0].error == "prompt_too_long"
    assert drive.last["huge", 0].finish == "error"
    drive.add(*(request(f"q{i}", 6, 4) for i in range(10)))
    drive.run()
    assert all(drive.last[f"q{i}", 0].finish == "length" for i in range(10))


def test_what_just_fits_runs() -> None:
    """The last token is produced but never computed: 32 slots hold a prompt of 29 and 4 tokens of output."""
    drive = Drive(blocks=8, block_size=4)
    drive.add(request("fits", 29, 4), request("not", 30, 4))
    drive.run()
    assert drive.last["fits", 0].finish == "length"
    assert drive.last["not", 0].error == "prompt_too_long"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tokens": []}, "bad_request"),
        ({"tokens": [-1]}, "bad_request"),
        ({"tokens": [5000]}, "bad_request"),
        ({"max_tokens": 0}, "bad_request"),
        ({"n": 0}, "bad_request"),
        ({"n": 1025}, "bad_request"),
        ({"weight": 0.0}, "bad_request"),
        ({"weight": float("nan")}, "bad_request"),
        ({"params": SamplingParams(logit_bias={5000: 1.0})}, "bad_request"),
        ({"params": SamplingParams(logit_bias={-1: 1.0})}, "bad_request"),
        *(
            ({"params": SamplingParams(**{name: value})}, "bad_request")
            for name in ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "repetition_penalty")
            for value in (float("nan"), float("inf"))
        ),
        ({"params": SamplingParams(temperature=-0.1)}, "bad_request"),
        ({"params": SamplingParams(temperature=1e300)}, "bad_request"),
        ({"params": SamplingParams(frequency_penalty=-1e300)}, "bad_request"),
        ({"params": SamplingParams(repetition_penalty=0.0)}, "bad_request"),
        ({"params": SamplingParams(logit_bias={1: float("nan")})}, "bad_request"),
        ({"params": SamplingParams(logit_bias={1: 1e300})}, "bad_request"),
        ({"params": SamplingParams(logprobs=-1)}, "bad_request"),
        ({"params": SamplingParams(top_k=2**40)}, "bad_request"),
        ({"params": SamplingParams(top_k=-(2**40))}, "bad_request"),
        ({"max_tokens": 100}, "prompt_too_long"),
    ],
)
def test_bad_requests_are_refused(fields: dict[str, Any], error: str) -> None:
    """security 43 and kin: what no model can compute with never reaches the runner."""
    planner = Planner(EngineConfig(), blocks=100, max_context=100, vocab_size=5000, records=True)
    values: dict[str, Any] = {"tokens": [1, 2], "max_tokens": 4} | fields
    made = planner.add(request("q", values.pop("tokens"), values.pop("max_tokens"), **values))
    assert made
    assert {(s.finish, s.error) for s in made} == {("error", error)}
    assert len(planner) == 0
    assert planner.plan() is None
    assert {record.error for record in planner.take_records()} == {error}


def test_an_id_runs_once() -> None:
    drive = Drive()
    drive.add(request("q", 4))
    with pytest.raises(ValueError, match="'q' is running already"):
        drive.add(request("q", 4))
    drive.run()


def test_slots() -> None:
    """max_running counts choices, also those that have not forked yet."""
    drive = Drive(max_running=4, blocks=200, max_step_tokens=8)
    drive.add(request("one", 12, 9, n=3), request("two", 4, 9, n=2), request("three", 4, 9))
    drive.step()
    drive.step()
    assert {s.id for s in drive.planner.roster.running} == {"one"}
    while drive.step():
        roster = drive.planner.roster
        assert len(roster.running) + roster.riders <= 4
    drive.idle()


def test_more_choices_than_slots() -> None:
    """engine I1: n above max_running still gives every choice; the prompt is billed once."""
    drive = Drive(max_running=2, prefix_cache=False)
    choices = drive.add(request("q", 6, 5, n=5))
    drive.add(request("next", 3, 2))
    drive.run()
    assert [choice.prompt_computed for choice in choices] == [6, 0, 0, 0, 0]
    assert {choice for choice in drive.last if choice[0] == "q"} == {("q", i) for i in range(5)}
    assert sum(last.prompt_computed for (name, _), last in drive.last.items() if name == "q") == 6


def test_cancel_of_the_only_request() -> None:
    """engine D11: nothing is left to schedule, the engine goes idle."""
    drive = Drive()
    drive.add(request("q", 4, 50))
    drive.step()
    drive.cancel("q")
    assert drive.step() is None
    drive.idle()
    assert drive.last["q", 0].finish == "cancelled"
    drive.cancel("q")
    drive.cancel("unknown")
    assert len(drive.order) == 1


def test_cancel_in_every_state() -> None:
    """Waiting, in the prompt, unforked, forked, preempted: the last output comes once per choice, blocks come back."""
    for steps in range(12):
        drive = Drive(blocks=10, block_size=2, max_step_tokens=4)
        drive.add(request("a", 6, 10, n=2), request("b", 6, 8), request("c", 6, 8, n=3))
        for _ in range(steps):
            drive.step()
        for name in "abc":
            drive.cancel(name)
        assert drive.step() is None
        drive.idle()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_cancel_of_one_choice_in_every_state(index: int) -> None:
    """Waiting, in the prompt, riding, forked, preempted: only it ends, its blocks come back, the others go on."""
    for steps in range(9):
        drive = Drive(blocks=10, block_size=2, max_step_tokens=4)
        drive.add(request("a", 6, 10, n=3), request("b", 6, 8))
        for _ in range(steps):
            drive.step()
        drive.cancel("a", index)
        drive.cancel("a", 7)
        drive.cancel("unknown", 0)
        drive.planner.check()
        drive.run()
        others = {choice: last.finish for choice, last in drive.last.items() if choice != ("a", index)}
        assert set(others.values()) == {"length"}
        assert drive.last["a", index].finish == "cancelled"
        assert len(drive.tokens["a", index]) < 10


def test_a_cancelled_first_choice_still_computes_the_prompt_of_the_others() -> None:
    drive = Drive(max_step_tokens=4)
    drive.add(request("a", 10, 6, n=2))
    drive.step()
    drive.cancel("a", 0)
    assert drive.last == {}, "the other choice waits for its prompt"
    drive.run()
    assert len(drive.tokens["a", 0]) == 1, "it ends with the commit that gives the first token"
    assert drive.last["a", 0].prompt_computed == 10
    assert len(drive.tokens["a", 1]) == 6


class Stingy:
    """A runner that gives no token in some steps."""

    def __init__(self, drive: Drive, every: int) -> None:
        self.drive, self.every, self.calls = drive, every, 0

    def step(self) -> bool:
        drive = self.drive
        plan = drive.planner.plan(drive.now)
        if plan is None:
            return False
        self.calls += 1
        result = drive.runner.run(plan)
        if self.calls % self.every:
            result = StepResult([Sampled([]) for _ in result.sampled])
        drive.take(drive.planner.commit(plan, result, drive.now))
        drive.planner.check()
        return True


def test_step_without_a_token() -> None:
    """engine D13: no token came, the sequence is computed again and ends with the right tokens."""
    drive = Drive(max_step_tokens=8)
    drive.add(request("a", 8, 5, n=3), request("b", 5, 1), request("c", 4, 4))
    stingy = Stingy(drive, 3)
    while stingy.step():
        pass
    drive.idle()
    assert all(last.finish == "length" for last in drive.last.values())


def test_who_is_cancelled_without_a_token_is_forgotten() -> None:
    drive = Drive()
    stingy = Stingy(drive, 10**9)
    for number in range(20):
        drive.add(request(f"q{number}", 8, 5))
        stingy.step()
        drive.cancel(f"q{number}")
    drive.add(request("last", 8, 5))
    stingy.step()
    assert len(drive.planner._commit._dry) == 1
    drive.cancel("last")
    drive.idle()


def test_never_a_token() -> None:
    """engine D13: a runner that never gives a token ends the sequence with an error instead of a hang."""
    drive = Drive()
    drive.add(request("a", 8, 5, n=2))
    stingy = Stingy(drive, 10**9)
    while stingy.step():
        assert stingy.calls < 50
    assert {last.error for last in drive.last.values()} == {"internal"}
    drive.idle()


def test_drafts_past_the_end_are_not_counted() -> None:
    """engine D13: several tokens in one step stop at the first that ends the sequence; the rest never existed."""
    drive = Drive()
    drive.add(request("a", 4, 3), request("b", 4, 9, params=SamplingParams(seed=0)))
    plan = drive.planner.plan()
    assert plan is not None
    outputs = drive.planner.commit(plan, StepResult([Sampled([1, 2, 3, 4, 5]), Sampled([1, 999, 2])]))
    assert [(o.tokens, o.output_tokens, o.finish) for o in outputs] == [
        ([1, 2, 3], 3, "length"),
        ([1, 999], 2, "stop"),
    ]
    assert drive.planner.pool.used == 0


@pytest.mark.parametrize(
    ("params", "produced", "finish"),
    [
        (SamplingParams(), [1, 999], "stop"),
        (SamplingParams(ignore_eos=True), [1, 999, 7, 999], "length"),
        (SamplingParams(stop_token_ids=(7,), ignore_eos=True), [1, 999, 7], "stop"),
        (SamplingParams(min_tokens=3), [1, 999, 7, 999], "stop"),
        (SamplingParams(min_tokens=2), [1, 999], "stop"),
    ],
)
def test_ends(params: SamplingParams, produced: list[int], finish: str) -> None:
    drive = Drive()
    drive.planner.add(request("q", 3, 4, params=params))
    got: list[int] = []
    for token in (1, 999, 7, 999):
        plan = drive.planner.plan()
        if plan is None:
            break
        (output,) = drive.planner.commit(plan, StepResult([Sampled([token])]))
        got += output.tokens
    assert (got, output.finish) == (produced, finish)
    assert output.output_tokens == len(produced)


def test_result_must_fit_the_plan() -> None:
    """A result of the wrong length changes nothing; the plan can then be failed."""
    drive = Drive()
    drive.add(request("q", 4, 4))
    plan = drive.planner.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="2 results for 1 samplers"):
        drive.planner.commit(plan, StepResult([Sampled([1]), Sampled([2])]))
    with pytest.raises(RuntimeError, match="neither committed nor failed"):
        drive.planner.plan()
    assert drive.planner.fail(plan, [], "internal") == []
    with pytest.raises(RuntimeError, match="not the open plan"):
        drive.planner.commit(plan, StepResult([]))
    drive.run()


def test_static_batches() -> None:
    """Static mode: nobody joins a batch; the next one starts when its last has ended, however short the others."""
    drive = Drive(mode="static", max_running=3, max_step_tokens=8, blocks=200)
    drive.add(*(request(f"q{i}", 4, 2 + 5 * (i % 3)) for i in range(7)))
    batches: list[set[str]] = []
    while (plan := drive.step()) is not None:
        ids = {chunk.sequence.id for chunk in plan.chunks}
        if not batches or not ids <= batches[-1]:
            fresh = ids - (batches[-1] if batches else set())
            assert not batches or not ids & batches[-1] or len(batches[-1]) < 3
            batches.append(ids) if not batches or not ids & batches[-1] else batches[-1].update(fresh)
    assert batches == [{"q0", "q1", "q2"}, {"q3", "q4", "q5"}, {"q6"}]
    drive.idle()


def test_without_kv_cache_all_rows_are_computed() -> None:
    """One 48-token answer to a 16-token prompt: 1,896 rows without the cache, 63 with it, the same tokens."""
    rows = {}
    for reuse in (True, False):
        drive = Drive(kv_cache_reuse=reuse, max_step_tokens=512)
        drive.add(request("q", 16, 48))
        drive.run()
        rows[reuse] = drive.runner.rows
    assert rows == {True: 63, False: 1896}


def test_without_kv_cache_choices_and_budget() -> None:
    drive = Drive(kv_cache_reuse=False, max_step_tokens=10, blocks=12, max_running=4)
    drive.add(request("a", 6, 8, n=3), request("b", 12, 5))
    drive.run()
    assert drive.planner.pool.hit_tokens == 0


def test_order_of_arrival() -> None:
    """Nobody overtakes a head that does not fit yet."""
    drive = Drive(blocks=10, block_size=4, max_step_tokens=64)
    drive.add(request("a", 24, 8), request("b", 20, 4), request("c", 2, 1))
    drive.step()
    assert {s.id for s in drive.planner.roster.running} == {"a"}
    drive.run()
    assert [name for name, _ in drive.order] == ["a", "c", "b"]


def test_a_blocked_head_costs_no_look_up_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a step does not grow with who waits: a head that does not fit is looked at now and then."""
    drive = Drive(blocks=12, block_size=4)
    drive.add(request("a", 4, 36), *(request(f"w{i}", 40, 4) for i in range(50)))
    drive.step()
    calls = 0
    lookup = drive.planner.pool.lookup

    def counted(keys: Any) -> list[int]:
        nonlocal calls
        calls += 1
        return lookup(keys)

    monkeypatch.setattr(drive.planner.pool, "lookup", counted)
    for _ in range(32):
        drive.step()
    assert calls <= 5


def test_stats() -> None:
    drive = Drive(blocks=20, block_size=4, max_running=2)
    drive.add(*(request(f"q{i}", 6, 4) for i in range(3)))
    drive.step()
    stats = drive.planner.stats(1.5)
    assert (stats.running, stats.waiting, stats.used_blocks, stats.free_blocks) == (2, 1, 4, 16)
    assert stats.step_ms == 1.5
    drive.run()


def test_prompt_progress_is_reported() -> None:
    """Each chunk of a prompt tells its cumulative count, so that a job is charged while its prompt runs."""
    drive = Drive(max_step_tokens=4)
    drive.add(request("q", 10, 2, n=2))
    drive.run()
    assert [(o.index, o.prompt_computed, len(o.tokens)) for o in drive.outputs] == [
        (0, 4, 0),
        (0, 8, 0),
        (0, 10, 1),
        (1, 0, 1),
        (0, 10, 1),
        (1, 0, 1),
    ]
