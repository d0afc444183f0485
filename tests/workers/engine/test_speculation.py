"""Guesses under the engine: the same tokens as without, whatever else happens; and they cost nobody anything.

The fake model draws by hash from so few tokens that what stood before is often right by chance.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.workers.engine.drive import Drive, request
from workers.config import EngineConfig
from workers.engine.plan import Chunk, Sampled, StepPlan, StepResult
from workers.protocol import Beams, SamplingParams

NGRAM = {"method": "ngram", "tokens": 4, "ngram_min": 1, "ngram_max": 2}


def drive(vocab: int = 3, **changes: Any) -> Drive:
    """An engine that guesses. Every check of ``Drive`` and of the fake runner holds for each step."""
    return Drive(vocab=vocab, **{"speculation": NGRAM, **changes})


def prompt(length: int, vocab: int = 3, salt: int = 0) -> list[int]:
    return [(7 * place * place + salt) % vocab for place in range(length)]


def guessing(plans: list[StepPlan]) -> list[Chunk]:
    return [chunk for plan in plans for chunk in plan.chunks if chunk.drafts]


def test_tokens_are_those_of_a_run_alone_in_fewer_steps() -> None:
    """Some guesses are right, some wrong; the counts add up; nothing wrong is ever reported or billed."""
    engine = drive()
    engine.add(request("a", prompt(20), 120))
    engine.run()
    stats = engine.planner.stats()
    assert stats.drafts_accepted > 0
    assert stats.drafts_rejected > 0
    assert stats.drafts_accepted + stats.drafts_rejected == sum(len(chunk.drafts) for chunk in guessing(engine.plans))
    assert len(engine.plans) == 120 - stats.drafts_accepted
    last = engine.last["a", 0]
    assert last.output_tokens == 120
    assert last.prompt_computed == 20
    record = engine.planner.take_records()[0]
    assert (record.drafts_accepted, record.drafts_rejected) == (stats.drafts_accepted, stats.drafts_rejected)
    assert record.recomputed == 0
    assert engine.planner.roster.recomputed == 0


def test_what_guesses_filled_is_published_and_hit() -> None:
    """Blocks that were completed by accepted guesses, and by those of the step that ended the sequence."""
    engine = drive(block_size=2)
    engine.add(request("a", prompt(8), 60))
    engine.run()
    assert engine.planner.stats().drafts_accepted > 0
    whole = prompt(8) + engine.tokens["a", 0]
    engine.add(request("b", whole, 4))
    engine.run()
    assert engine.last["b", 0].prompt_cached == (len(whole) - 1) // 2 * 2


@pytest.mark.parametrize("end", [1, 2])
def test_an_end_inside_a_run_of_guesses_ends_there(end: int) -> None:
    """What was accepted behind a stop token is neither reported nor computed nor counted."""
    engine = drive()
    params = SamplingParams(seed=0, ignore_eos=True, stop_token_ids=(end,), min_tokens=25)
    for number in range(12):
        engine.add(request(f"r{number}", prompt(12, salt=number), 100, params=params))
        engine.run()
        tokens = engine.tokens[f"r{number}", 0]
        assert tokens[-1] == end
        assert end not in tokens[24:-1]
    assert engine.planner.stats().drafts_accepted > 0


def test_no_guess_reaches_past_max_tokens() -> None:
    """Nor past the blocks that the worst case needs."""
    engine = drive(blocks=8, block_size=4)
    engine.add(request("a", prompt(12), 20))
    engine.run()
    assert all(chunk.start + chunk.count <= 31 for chunk in guessing(engine.plans))
    assert engine.last["a", 0].output_tokens == 20


def test_guesses_take_only_what_a_step_has_left() -> None:
    """Decodes and prompts first: with a budget that is spent, nobody guesses."""
    engine = drive(max_step_tokens=4)
    engine.add(*(request(f"r{number}", prompt(10, salt=number), 30) for number in range(4)))
    engine.run()
    assert not any(chunk.drafts for plan in engine.plans if len(plan.chunks) == 4 for chunk in plan.chunks)
    assert all(plan.tokens <= 4 for plan in engine.plans)
    assert guessing(engine.plans)


@pytest.mark.parametrize("blocks", [14, 20, 40])
def test_nobody_gives_way_to_a_guess(blocks: int) -> None:
    """A guess finds its block beyond one for each that runs, or is not made."""
    engine = drive(blocks=blocks)
    drafting, roster = engine.planner._drafting, engine.planner.roster
    assert drafting is not None
    fill, taken = drafting.fill, 0

    def watched(plan: StepPlan) -> None:
        nonlocal taken
        available, preemptions = roster.pool.available, roster.preemptions
        fill(plan)
        grown = available - roster.pool.available
        taken += grown
        assert not grown or roster.pool.available - roster.promised >= len(roster.running)
        assert roster.preemptions == preemptions

    drafting.fill = watched  # type: ignore[method-assign]
    engine.add(*(request(f"r{number}", prompt(9, salt=number), 40) for number in range(5)))
    engine.run()
    assert taken > 0
    assert guessing(engine.plans)


def test_preempted_in_the_middle_of_guesses() -> None:
    """Blocks go, guesses are forgotten, tokens stay."""
    engine = drive(blocks=14)
    engine.add(*(request(f"r{number}", prompt(9, salt=number), 40) for number in range(5)))
    engine.run()
    assert engine.planner.roster.preemptions > 0
    assert engine.planner.stats().drafts_accepted > 0


def test_choices_guess_for_themselves() -> None:
    """n > 1: after the fork each has its own tokens and its own index."""
    engine = drive(blocks=128)
    engine.add(request("a", prompt(13), 50, n=3))
    engine.run()
    guessed = {chunk.sequence.index for chunk in guessing(engine.plans)}
    assert guessed == {0, 1, 2}


def test_beams_do_not_guess() -> None:
    """Their lines are taken over by others."""
    engine = drive(vocab=50)
    engine.add(request("a", prompt(9), 12, params=SamplingParams(temperature=0), beams=Beams(3)))
    for _ in range(100):
        if engine.step() is None:
            break
    assert not guessing(engine.plans)
    assert engine.last["a", 0].finish == "length"


def test_a_failed_step_leaves_nothing_of_its_guesses() -> None:
    """The others are planned again, with the same tokens in the end."""
    engine = drive()
    engine.add(request("a", prompt(12), 60), request("b", prompt(14, salt=1), 60))
    failed = 0
    while failed < 5:
        plan = engine.planner.plan(engine.now)
        assert plan is not None
        if guessing([plan]):
            engine.take(engine.planner.fail(plan, [], "internal", engine.now))
            failed += 1
        else:
            engine.take(engine.planner.commit(plan, engine.runner.run(plan), engine.now))
        engine.planner.check()
        engine.step()
    engine.run()


def test_a_result_that_does_not_continue_the_guesses_is_refused() -> None:
    """Before anything changes: then the step is failed."""
    engine = drive()
    engine.add(request("a", prompt(12), 60))
    while not guessing([plan for plan in [engine.planner.plan(engine.now)] if plan]):
        plan = engine.planner._open
        assert plan is not None
        engine.take(engine.planner.commit(plan, engine.runner.run(plan), engine.now))
    plan = engine.planner._open
    assert plan is not None
    wrong = [plan.chunks[0].drafts[0] ^ 1, 0]
    with pytest.raises(ValueError, match="do not begin with the guesses"):
        engine.planner.commit(plan, StepResult([Sampled(wrong)]), engine.now)
    engine.take(engine.planner.fail(plan, [], "internal", engine.now))
    engine.run()


def test_a_purge_meets_guesses() -> None:
    """Blocks that were taken for guesses are zeroed like the others when they are given back."""
    engine = drive()
    engine.add(request("a", prompt(12), 80))
    for _ in range(20):
        engine.step()
    engine.planner.purge([b"scope"])
    engine.run()
    engine.runner.zero_blocks(engine.planner.take_dirty())
    assert engine.runner.holds(b"scope") == 0


def test_it_ends_where_it_loses_and_where_rows_are_dear() -> None:
    """A model of many tokens: guesses are wrong, so they become rare. A full step: rows cost what they bring."""
    engine = drive(vocab=40, blocks=2000)
    engine.add(request("a", prompt(400, vocab=40), 1500))
    engine.run()
    chunks = guessing(engine.plans)
    assert 0 < len(chunks) < 0.1 * len(engine.plans)


def test_switches_that_make_no_sense_are_refused() -> None:
    """With the field, its value and what to do."""
    for block, words in (
        ({"method": "draft"}, "draft_model: method draft needs one"),
        ({"method": "ngram", "draft_model": "hf:a/b"}, "'hf:a/b' is not used by method ngram"),
        ({"method": "ngram", "ngram_min": 5}, "ngram_min: 5 is above ngram_max=4"),
        ({"method": "ngram", "tokens": 0}, "greater than or equal to 1"),
        ({"method": "guess"}, "'ngram' or 'draft'"),
    ):
        with pytest.raises(ValidationError, match=words):
            EngineConfig(speculation=block)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="kv_cache_reuse"):
        EngineConfig(speculation=NGRAM, kv_cache_reuse=False)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=8
    ),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(10, 60),
    st.integers(1, 40),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([0, 3, 20]),
    st.data(),
)
def test_any_schedule_gives_the_tokens_of_a_run_alone(
    requests: list[tuple[int, int, int, int]],
    vocab: int,
    block_size: int,
    blocks: int,
    budget: int,
    guesses: int,
    prefix_cache: bool,
    twice_at: int,
    data: st.DataObject,
) -> None:
    """Requests that come when they like, choices, cancels, tight pools and small budgets; every step is checked."""
    engine = Drive(
        vocab=vocab,
        blocks=blocks,
        block_size=block_size,
        max_step_tokens=budget,
        max_running=6,
        prefix_cache=prefix_cache,
        speculation={**NGRAM, "tokens": guesses},
        twice_at=twice_at,
    )
    for number, (length, output, choices, wait) in enumerate(requests):
        engine.add(request(f"r{number}", prompt(length, vocab, number % 2), output, n=choices))
        for _ in range(wait):
            engine.step()
        if data.draw(st.integers(0, 5)) == 0:
            engine.cancel(f"r{data.draw(st.integers(0, number))}")
    for _ in range(20_000):
        if engine.step() is None:
            break
    engine.idle()
