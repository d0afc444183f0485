"""Prompts are scored whole and once, whatever the caches hold and whatever happens on the way (engine A13)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.drive import Drive
from workers.engine import scoring
from workers.engine.plan import StepResult
from workers.engine.testing import likelihood
from workers.protocol import Generate, SamplingParams, SequenceOutput

SCORED = SamplingParams(seed=1, logprobs=0, prompt_logprobs=True)


def request(name: str, tokens: list[int], *, n: int = 1, scored: bool = True, max_tokens: int = 3) -> Generate:
    params = SCORED if scored else SamplingParams(seed=1)
    return Generate(name, tokens, max_tokens, params, n=n, scope=b"s", tenant_key=name[0])


def scores(outputs: list[SequenceOutput], name: str) -> list[tuple[int, float]]:
    """As a gateway puts them together; every message counts them right."""
    found: list[tuple[int, float]] = []
    for output in outputs:
        if output.id == name:
            found += [(score.token, score.logprob) for score in output.prompt_logprobs]
            if output.prompt_logprobs:
                assert output.index == 0
                assert output.prompt_scored == len(found)
    return found


def expected(tokens: list[int]) -> list[tuple[int, float]]:
    return [(token, likelihood(tokens[: place + 1])) for place, token in enumerate(tokens)][1:]


@pytest.mark.parametrize("reuse", [True, False])
def test_warm_and_cold_prompts_in_any_order_have_the_same_scores(reuse: bool) -> None:
    """engine A13: the prefix is cached, by requests that were scored and by others."""
    drive = Drive(max_step_tokens=16, kv_cache_reuse=reuse)
    shared, longer = list(range(1, 30)), [*range(1, 30), 40, 41, 42, 43]
    for turn, tokens in enumerate((shared, longer, shared, longer)):
        drive.add(request(f"plain {turn}", tokens, scored=False), request(f"scored {turn}", tokens))
        drive.run()
        assert scores(drive.outputs, f"scored {turn}") == expected(tokens)
        assert scores(drive.outputs, f"plain {turn}") == []
        assert drive.last[f"scored {turn}", 0].prompt_cached == 0
    assert drive.last["plain 3", 0].prompt_cached > 0 or not reuse


@pytest.mark.parametrize("reuse", [True, False])
def test_a_step_scores_no_more_rows_than_it_may(reuse: bool) -> None:
    """Without a KV cache too, where a step computes whole prompts."""
    drive = Drive(blocks=512, max_step_tokens=512, kv_cache_reuse=reuse)
    prompts = {f"{place}": [place, *range(1, 150)] for place in range(4)}
    drive.add(*(request(name, tokens) for name, tokens in prompts.items()))
    most = 0
    while (plan := drive.planner.plan(0)) is not None:
        most = max(most, sum(len(scoring.rows(chunk)) for chunk in plan.chunks))
        drive.take(drive.planner.commit(plan, drive.runner.run(plan), 1))
    assert 1 < most <= scoring.MOST_ROWS
    assert all(scores(drive.outputs, name) == expected(tokens) for name, tokens in prompts.items())


def test_nobody_waits_behind_a_prompt_that_waits_to_be_scored() -> None:
    """A step has no rows left to score, but rows, blocks and slots."""
    drive = Drive(blocks=512, max_step_tokens=512)
    long = list(range(1, 301))
    drive.add(request("a", [7, *long]), request("b", [8, *long]), request("c", [9, *long[:40]], scored=False))
    plan = drive.planner.plan(0)
    assert plan is not None
    assert [chunk.sequence.id for chunk in plan.chunks] == ["a", "c"]
    drive.take(drive.planner.commit(plan, drive.runner.run(plan), 1))
    drive.run()
    assert scores(drive.outputs, "a") == expected([7, *long])
    assert scores(drive.outputs, "b") == expected([8, *long])


def test_choices_share_the_scores_of_their_prompt() -> None:
    drive = Drive(max_step_tokens=8)
    drive.add(request("a", list(range(1, 20)), n=3), request("b", [7]), request("c", [7, 8]))
    drive.run()
    assert scores(drive.outputs, "a") == expected(list(range(1, 20)))
    assert scores(drive.outputs, "b") == []
    assert scores(drive.outputs, "c") == expected([7, 8])


def test_scores_that_are_not_the_plans_are_refused() -> None:
    drive = Drive()
    drive.add(request("a", [1, 2, 3]))
    plan = drive.planner.plan(0)
    assert plan is not None
    result = drive.runner.run(plan)
    with pytest.raises(ValueError, match=r"returned \[\] for prompts of which \[2\] rows"):
        drive.planner.commit(plan, StepResult(result.sampled))
    drive.take(drive.planner.commit(plan, result, 1))
    assert scores(drive.outputs, "a") == expected([1, 2, 3])


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 24), st.booleans(), st.integers(1, 2)), max_size=7),
    blocks=st.integers(24, 40),
    budget=st.integers(6, 40),
    windows=st.sampled_from([(0,), (0, 8)]),
)
def test_preemption_and_mixed_steps_lose_no_score(
    lengths: list[tuple[int, int, bool, int]], blocks: int, budget: int, windows: tuple[int, ...]
) -> None:
    """The pool is small: sequences give way in the middle of their prompts, and of their answers."""
    drive = Drive(blocks=blocks * len(windows) * 2, max_step_tokens=budget, windows=windows)
    prompts: dict[str, list[int]] = {}
    for number, (length, more, scored, n) in enumerate(lengths):
        name = f"{number}"
        prompts[name] = [1 + number % 2, *range(2, length + 1)]
        drive.add(request(name, prompts[name], n=n, scored=scored, max_tokens=more))
        drive.step()
    drive.run()
    for number, (_, _, scored, _) in enumerate(lengths):
        tokens = prompts[f"{number}"]
        assert scores(drive.outputs, f"{number}") == (expected(tokens) if scored else [])
