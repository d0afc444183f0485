"""What is asked of a model, by name. Each task gives one figure, of which more or less is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from gateway.bench.evals import problems
from gateway.bench.evals.sandbox import passes
from gateway.bench.evals.subject import Reading, Subject, Tick
from gateway.bench.report import BenchError

LANGUAGES = ("en", "de", "fr", "es", "zh")
SUMS = 40
RETRIEVAL = {200: 2, 900: 2, 2500: 1}
"""Words of a text, and how often one of that length is asked at each depth; those that a model's context or cache does
not hold are left out."""
CODE_TOKENS, ANSWER_TOKENS = 120, 6


class UnfitError(BenchError):
    """The task is nothing for this model; the text says why. The others are run all the same."""


@dataclass(frozen=True, slots=True)
class Score:
    """``value`` over ``count`` items (tokens, questions)."""

    value: float
    count: int


@dataclass(frozen=True, slots=True)
class Task:
    """``better``: ``less`` for perplexity, which is compared by ratio; ``more`` for parts of 1, by difference."""

    name: str
    better: Literal["less", "more"]
    run: Callable[[Subject, Tick], Score]


def text(language: str) -> str:
    """One of the shipped texts."""
    return (files("gateway.bench.evals") / "texts" / f"{language}.txt").read_text(encoding="utf-8").strip()


def perplexity(reading: Reading) -> Score:
    """e to the mean surprise; infinite where a token was impossible."""
    count = len(reading.log_probabilities)
    return Score(math.exp(min(700.0, -math.fsum(reading.log_probabilities) / count)), count)


def agreement(before: list[Reading], after: list[Reading]) -> Score:
    """The part of all places in the texts where both hold the same token for the likeliest."""
    pairs = [
        one == other
        for first, second in zip(before, after, strict=True)
        for one, other in zip(first.likeliest, second.likeliest, strict=True)
    ]
    return Score(sum(pairs) / len(pairs), len(pairs))


def _reads(language: str) -> Callable[[Subject, Tick], Score]:
    return lambda subject, tick: perplexity(subject.read(text(language)))


def _begins(answers: list[str], questions: list[problems.Question]) -> Score:
    """An answer is right when it begins with the expected one and the number ends there."""
    right = 0
    for answer, question in zip(answers, questions, strict=True):
        said, expected = answer.strip(), question.answer.strip()
        right += said.startswith(expected) and not said[len(expected) : len(expected) + 1].isdigit()
    return Score(right / len(questions), len(questions))


def _arithmetic(subject: Subject, tick: Tick) -> Score:
    questions = problems.arithmetic(SUMS)
    return _begins(subject.answer([one.prompt for one in questions], ANSWER_TOKENS, tick), questions)


def _retrieval(subject: Subject, tick: Tick) -> Score:
    questions = [
        question
        for words, times in RETRIEVAL.items()
        for seed in range(times)
        for question in problems.retrieval(words, seed=seed)
        if subject.tokens(question.prompt) + ANSWER_TOKENS <= subject.most_tokens
    ]
    if not questions:
        raise UnfitError(f"a context of {subject.most_tokens} tokens holds none of its texts")
    return _begins(subject.answer([one.prompt for one in questions], ANSWER_TOKENS, tick), questions)


def _code(subject: Subject, tick: Tick) -> Score:
    answers = subject.answer([problems.asked(one) for one in problems.CODE], CODE_TOKENS, tick)
    programs = [problems.program(*pair) for pair in zip(problems.CODE, answers, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        passed = sum(pool.map(passes, programs))
    return Score(passed / len(programs), len(programs))


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        *(Task(f"perplexity-{language}", "less", _reads(language)) for language in LANGUAGES),
        Task("retrieval", "more", _retrieval),
        Task("arithmetic", "more", _arithmetic),
        Task("code", "more", _code),
    )
}
"""All but the agreement of two, which takes both."""
AGREEMENT = "agreement"
