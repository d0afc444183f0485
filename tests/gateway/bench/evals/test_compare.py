"""Scores, what was lost between two, and when that is too much."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest

from gateway.bench.evals import compare, problems, tasks
from gateway.bench.evals.subject import Reading, Tick
from gateway.bench.evals.tasks import Score
from gateway.bench.report import BenchError


@contextlib.contextmanager
def stage(_: str) -> Iterator[Tick]:
    yield lambda done, total: None


def test_perplexity_is_the_geometric_mean_of_one_over_probability() -> None:
    found = tasks.perplexity(Reading([math.log(1 / 2), math.log(1 / 8)], [0, 0]))
    assert found.value == pytest.approx(4.0)
    assert found.count == 2
    assert tasks.perplexity(Reading([-math.inf], [0])).value > 1e300


def test_agreement_counts_places_over_all_texts() -> None:
    before = [Reading([0.0, 0.0], [1, 2]), Reading([0.0], [3])]
    after = [Reading([0.0, 0.0], [1, 9]), Reading([0.0], [3])]
    assert tasks.agreement(before, after) == Score(2 / 3, 3)


def test_a_drop_is_a_ratio_of_perplexities_and_a_difference_of_parts() -> None:
    assert compare.drop("perplexity-en", Score(20.0, 9), Score(21.0, 9)) == pytest.approx(5.0)
    assert compare.drop("perplexity-en", Score(20.0, 9), Score(19.0, 9)) == pytest.approx(-5.0)
    assert compare.drop("code", Score(0.5, 12), Score(0.25, 12)) == pytest.approx(25.0)


@pytest.mark.parametrize(("drop", "failed"), [(1.9, False), (2.0, False), (2.1, True), (-9.0, False), (math.nan, True)])
def test_too_much_is_more_than_allowed(drop: float, failed: bool) -> None:
    """What cannot be compared is too much."""
    assert compare.Row("code", Score(1, 1), Score(1, 1), drop, 2.0).failed is failed


def test_allowances_are_for_all_or_for_one() -> None:
    assert compare.allowances([])["perplexity-en"] == compare.MAX_DROP
    assert compare.allowances([])["code"] == compare.MAX_POINTS
    found = compare.allowances(["3", "code=10"])
    assert (found["code"], found["arithmetic"], found["perplexity-en"]) == (10.0, 3.0, 3.0)


@pytest.mark.parametrize("text", ["much", "code=", "-1", "code=nan", "inf", "cooking=3"])
def test_a_wrong_allowance_is_named(text: str) -> None:
    with pytest.raises(BenchError, match="--max-drop"):
        compare.allowances([text])


def test_an_unknown_task_is_named_with_those_there_are() -> None:
    with pytest.raises(BenchError, match=r"'cooking'.*perplexity-en.*agreement"):
        compare.pick(["code", "cooking"])
    assert compare.pick(["code", "perplexity-de"]) == ["perplexity-de", "code"]


def test_an_answer_is_the_whole_number() -> None:
    """``12`` is no answer to a question whose answer is ``1``."""
    questions = [problems.Question("", " 1")] * 4
    assert tasks._begins([" 1\n", "1", " 12", " 2"], questions).value == 0.5


def test_questions_are_right_and_the_same_every_time() -> None:
    """Each has the answer that its last line asks for; the worked ones are right too."""
    for question in problems.arithmetic(30):
        for line in (question.prompt + question.answer).splitlines():
            task, _, answer = line.partition("=")
            assert eval(task) == int(answer)
    assert problems.arithmetic(5) == problems.arithmetic(5)
    for question in problems.retrieval(200):
        colour = question.prompt.rsplit("number of the ", 1)[1].split()[0]
        assert question.prompt.count(f"The number of the {colour} box is{question.answer}.") == 1
    lengths = [len(one.prompt.split()) for one in problems.retrieval(400)]
    assert min(lengths) > 300


def test_texts_are_there_in_every_language() -> None:
    assert all(len(tasks.text(language)) > 150 for language in tasks.LANGUAGES)
