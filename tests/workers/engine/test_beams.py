"""Beam search in the planner: the same answers under every schedule, blocks shared, and all of them given back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.drive import Choice, Drive, request
from workers.engine.beams import BeamSearch, Step, assign
from workers.engine.plan import Sampled, StepResult
from workers.engine.roster import MAX_PREEMPTIONS
from workers.engine.sequence import Sequence
from workers.engine.testing import candidates
from workers.protocol import Beams, Generate, SamplingParams

ENDS = SamplingParams(temperature=0.0, stop_token_ids=tuple(range(0, 900, 45)))


class BeamDrive(Drive):
    """Searches are held against the same search alone, everything else as ever."""

    def compare(self, choice: Choice, generate: Generate) -> None:
        if generate.beams is None:
            super().compare(choice, generate)
        elif self.last[choice].finish in ("stop", "length"):
            assert (self.tokens[choice], self.last[choice].finish) == alone(generate)[choice[1]]


def beams(
    name: str, prompt: list[int] | int, max_tokens: int, width: int, n: int | None = None, **how: Any
) -> Generate:
    params = how.pop("params", SamplingParams(temperature=0.0, ignore_eos=True))
    search = Beams(width, **{key: how.pop(key) for key in ("length_penalty", "early_stopping") if key in how})
    return request(name, prompt, max_tokens, params=params, n=n or width, beams=search, **how)


def alone(generate: Generate) -> list[tuple[list[int], str]]:
    """Answers and ends by the plain definition: every line is kept whole, nothing is shared."""
    assert generate.beams is not None
    asked, ends = generate.beams, set(generate.params.stop_token_ids)
    count = max(2, 1 + len(ends)) * asked.width
    lines: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, generate.max_tokens + 1):
        best = sorted(
            (
                (-(score + logprob), rank, place, [*line, token])
                for rank, (score, line) in enumerate(lines)
                for place, (token, logprob) in enumerate(candidates([*generate.tokens, *line], count, 900))
            )
        )[:count]
        last = length == generate.max_tokens
        ended = [
            (-loss / length**asked.length_penalty, line)
            for loss, _, _, line in best[: asked.width]
            if last or line[-1] in ends
        ]
        done = sorted([*done, *ended], key=lambda one: -one[0])[: asked.width]
        lines = [(-loss, line) for loss, _, _, line in best if line[-1] not in ends][: asked.width]
        if len(done) == asked.width:
            reach = generate.max_tokens if asked.early_stopping == "never" and asked.length_penalty > 0 else length
            if asked.early_stopping is True or lines[0][0] / reach**asked.length_penalty <= done[-1][0]:
                break
    return [(line, "stop" if line[-1] in ends else "length") for _, line in done[: generate.n]]


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0, 2.0])
def test_answers_are_those_of_the_definition(early: bool | str, penalty: float) -> None:
    drive = BeamDrive(blocks=200)
    drive.add(beams("s", 9, 12, 4, 3, params=ENDS, early_stopping=early, length_penalty=penalty))
    drive.run()
    assert penalty > 0 or drive.last["s", 0].finish == "stop"
    assert ("s", 3) not in drive.last, "a beam beyond n tells nothing"


def test_one_beam_is_greedy() -> None:
    drive = BeamDrive(blocks=64)
    drive.add(beams("s", [1, 2, 3], 6, 1))
    drive.run()
    line = [1, 2, 3]
    for _ in range(6):
        line.append(candidates(line, 1, 900)[0][0])
    assert drive.tokens["s", 0] == line[3:]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_schedule_gives_the_same_answers(data: st.DataObject) -> None:
    """Few blocks, few rows per step, other work beside it, with and without prefix cache."""
    drive = BeamDrive(
        blocks=data.draw(st.integers(34, 60)),
        max_step_tokens=data.draw(st.sampled_from([2, 5, 16, 64])),
        max_running=data.draw(st.sampled_from([2, 6, 32])),
        prefix_cache=data.draw(st.booleans()),
    )
    for index in range(data.draw(st.integers(2, 5))):
        prompt, length = data.draw(st.integers(1, 18)), data.draw(st.integers(1, 14))
        if data.draw(st.booleans()):
            width = data.draw(st.integers(1, 4))
            params = data.draw(st.sampled_from([ENDS, SamplingParams(ignore_eos=True)]))
            drive.add(beams(f"b{index}", prompt, length, width, data.draw(st.integers(1, width)), params=params))
        else:
            drive.add(request(f"r{index}", prompt, length, n=data.draw(st.integers(1, 3))))
        for _ in range(data.draw(st.integers(0, 6))):
            drive.step()
    drive.run()


def test_full_blocks_are_shared_and_tails_copied() -> None:
    """The prompt's blocks are there once; a beam that takes another's line copies its last, partial block only."""
    drive = BeamDrive(blocks=200, prefix_cache=False)
    drive.add(beams("s", 42, 20, 4))
    while drive.step() is not None:
        running = drive.planner.roster.running
        if len(running) == 4:
            assert all(one.blocks[:10] == running[0].blocks[:10] for one in running)
            assert drive.planner.pool.spared >= 30
    drive.idle()
    most = max(len(plan.copies) for plan in drive.plans)
    assert 0 < most <= 3


def test_preempted_search_starts_over_and_bills_nothing_twice() -> None:
    drive = BeamDrive(blocks=22, prefix_cache=False)
    drive.add(request("old", 16, 40), beams("s", 16, 24, 3))
    drive.run()
    assert drive.planner.roster.preemptions > 0
    last = drive.last["s", 0]
    assert last.searched == 3 * 24
    assert drive.last["s", 1].searched == 0
    told = [output.searched for output in drive.outputs if output.id == "s" and output.index == 0]
    assert told == sorted(told, key=lambda count: count or 0), "cumulative"
    assert last.prompt_computed == 16


def test_search_preempted_too_often_gets_a_promise() -> None:
    """A light tenant's search gives way to everybody, four times; then it returns when all it may need is there."""
    drive = BeamDrive(blocks=32, prefix_cache=False, max_step_tokens=64)
    drive.add(beams("s", 4, 40, 3, tenant_key="light", weight=0.01))
    promised = 0
    for index in range(60):
        drive.add(request(f"r{index}", 4, 60))
        for _ in range(6):
            drive.step()
            promised = max(promised, drive.planner.roster.promised)
    drive.run()
    last = drive.last["s", 0]
    assert last.timings is not None
    assert last.timings.preemptions == MAX_PREEMPTIONS
    assert promised > 0
    assert last.searched == 3 * 40


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_cancel_gives_every_block_back(steps: int) -> None:
    drive = BeamDrive(blocks=64, max_step_tokens=8)
    drive.add(beams("s", 12, 20, 4, 2))
    for _ in range(steps):
        drive.step()
    drive.cancel("s", 1)
    assert not drive.last, "one answer of a search cannot be cancelled"
    drive.cancel("s")
    assert {choice: last.finish for choice, last in drive.last.items()} == {
        ("s", 0): "cancelled",
        ("s", 1): "cancelled",
    }
    drive.run()


def test_purged_search_goes_on_and_leaves_nothing() -> None:
    drive = BeamDrive(blocks=64)
    drive.add(beams("s", 12, 16, 4))
    for _ in range(6):
        drive.step()
    drive.planner.purge([b"scope"])
    drive.run()
    assert drive.runner.holds(b"scope") == 0


def test_nothing_of_what_beams_wrote_is_published() -> None:
    drive = BeamDrive(blocks=64)
    drive.add(beams("s", 8, 24, 2))
    drive.run()
    assert drive.planner.pool.cached == 2


@pytest.mark.parametrize(
    ("generate", "error"),
    [
        (beams("s", 8, 4, 2, 3), "bad_request"),
        (beams("s", 8, 4, 0, 1), "bad_request"),
        (beams("s", 8, 4, 65), "bad_request"),
        (beams("s", 8, 4, 2, length_penalty=11.0), "bad_request"),
        (beams("s", 8, 4, 2, length_penalty=float("nan")), "bad_request"),
        (beams("s", 8, 80, 4), "prompt_too_long"),
    ],
)
def test_impossible_searches_are_refused(generate: Generate, error: str) -> None:
    drive = BeamDrive(blocks=64)
    drive.add(generate)
    assert {last.error for last in drive.last.values()} == {error}
    assert len(drive.last) == generate.n, "as many last outputs as choices"
    drive.run()


def test_without_kept_keys_and_values_there_is_no_search() -> None:
    drive = BeamDrive(kv_cache_reuse=False)
    drive.add(beams("s", 8, 4, 2))
    assert drive.last["s", 0].error == "bad_request"


def test_runner_that_tells_too_little_ends_the_search() -> None:
    drive = BeamDrive()
    drive.add(beams("s", 8, 4, 3, 2))
    plan = drive.planner.plan(1)
    assert plan is not None
    drive.take(drive.planner.commit(plan, StepResult([Sampled([], candidates=[(1, -1.0)])]), 2))
    assert [drive.last["s", index].error for index in range(2)] == ["internal", "internal"]
    assert drive.planner.pool.used == 0
    drive.planner.check()


def test_failed_step_ends_the_search_whole() -> None:
    drive = BeamDrive(max_step_tokens=8)
    drive.add(beams("s", 6, 12, 4, 4), request("r", 3, 4))
    for _ in range(4):
        drive.step()
    plan = drive.planner.plan(1)
    assert plan is not None
    drive.take(drive.planner.fail(plan, ["s"], "internal", 2))
    assert {drive.last["s", index].error for index in range(4)} == {"internal"}
    drive.run()


def test_a_parent_goes_on_with_its_best_line() -> None:
    a, b, c = (Sequence(name, 0, [1], 1, 1, SamplingParams()) for name in "abc")
    steps = [Step(b, 5, -1.0), Step(b, 6, -2.0), Step(a, 7, -3.0)]
    assert assign(steps, [a, b, c]) == [(b, steps[0]), (c, steps[1]), (a, steps[2])]


def test_a_search_waits_for_all_of_its_beams() -> None:
    search = BeamSearch(Beams(2), 2, 8, frozenset())
    first, second = (Sequence("s", index, [1], 1, 8, SamplingParams()) for index in range(2))
    search.members += [first, second]
    assert search.tell(first, [(1, -0.1), (2, -0.2), (3, -0.3), (4, -0.4)])
    assert [step.token for step in search.turn()] == [1, 2]
    search.settle([(first, -0.1), (second, -0.2)])
    assert not search.tell(second, [(1, -0.1)] * 4)
    assert search.tell(first, [(9, -0.05)] * 4)
    assert search.turn()[0] == Step(first, 9, pytest.approx(-0.15))
