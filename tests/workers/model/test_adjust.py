"""Penalties, bans and cuts against transformers' processors, which are what users know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from workers.engine.sequence import Sequence
from workers.model.adjust import adjust
from workers.model.sampler import _cut, _keep_typical, sample
from workers.protocol import SamplingParams

VOCAB = 200


def sampler(prompt: list[int], output: list[int] = [], seed: int = 0, **params: Any) -> Sequence:  # noqa: B006
    return Sequence("s", 0, [*prompt, *output], len(prompt), 100, SamplingParams(**params), seed=seed)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 2)


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.8, 5.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    """Over prompt and output, once however often a token occurs; rows of several lengths, others untouched."""
    rows = [[1, 2, 2, 7], [0], [199, 5, 5, 5, 199, 3, 8], [4, 4]]
    raw = logits(5)
    mine = raw.clone()
    samplers = [sampler(tokens[:1], tokens[1:], repetition_penalty=penalty) for tokens in rows]
    samplers.insert(2, sampler([1, 2, 3]))
    adjust(mine, samplers)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    for row, one in enumerate(samplers):
        expected = raw[row : row + 1].clone()
        if row != 2:
            expected = theirs(torch.tensor([one.tokens]), expected)
        torch.testing.assert_close(mine[row], expected[0], rtol=0, atol=0)


def test_penalties_and_bias_are_the_published_formula() -> None:
    """OpenAI's: logit - count · frequency - [count > 0] · presence over the output, plus the bias; row by row."""
    random = np.random.default_rng(4)
    raw = logits(40, seed=4)
    samplers = []
    for _ in raw:
        presence, frequency = (float(random.choice([0, random.uniform(-2, 2)])) for _ in range(2))
        bias = {int(token): float(random.uniform(-100, 100)) for token in random.integers(0, VOCAB, random.integers(4))}
        output = random.integers(0, 12, random.integers(0, 30)).tolist()
        fields = {"presence_penalty": presence, "frequency_penalty": frequency, "logit_bias": bias}
        samplers.append(sampler([3, 3, 150], output, **fields))
    mine = raw.clone()
    adjust(mine, samplers)
    for row, one in enumerate(samplers):
        expected = raw[row].double()
        for token in range(VOCAB):
            count = one.output.count(token)
            expected[token] -= count * one.params.frequency_penalty + (count > 0) * one.params.presence_penalty
            expected[token] += one.params.logit_bias.get(token, 0.0)
        torch.testing.assert_close(mine[row].double(), expected, rtol=1e-5, atol=1e-5)


def test_bad_words_are_transformers() -> None:
    """Single tokens always, longer rows where the output ends with their beginning (not where the prompt does)."""
    words = [[9], [5, 6], [5, 6, 7], [8, 8]]
    theirs = NoBadWordsLogitsProcessor(words, eos_token_id=199)
    outputs = [[], [5], [5, 6], [1, 5, 6], [6], [8], [8, 8], [3, 4]]
    raw = logits(len(outputs))
    mine = raw.clone()
    adjust(mine, [sampler([1], output, bad_words=tuple(map(tuple, words))) for output in outputs])
    for row, output in enumerate(outputs):
        expected = theirs(torch.tensor([[1, *output]]), raw[row : row + 1].clone())
        assert torch.equal(mine[row], expected[0])
    in_prompt = raw[:1].clone()
    adjust(in_prompt, [sampler([1, 5], bad_words=((5, 6),))])
    assert torch.equal(in_prompt[0], raw[0])


@pytest.mark.parametrize("typical", [0.05, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("more", [{}, {"top_k": 20}, {"top_p": 0.8, "temperature": 0.6}, {"min_p": 0.05}], ids=str)
def test_the_set_that_may_be_drawn_is_transformers(typical: float, more: dict[str, float]) -> None:
    """typical_p after temperature, top_k, top_p and min_p, in a batch with rows that do not want it."""
    raw = logits(12, seed=3)
    params: dict[str, Any] = {"typical_p": typical, **more}
    samplers = [sampler([1], seed=row, **(params if row % 3 else more)) for row in range(12)]
    scaled = (raw - raw.amax(dim=-1, keepdim=True)) / params.get("temperature", 1.0)
    scaled.masked_fill_(scaled < _cut(scaled, samplers)[:, None], -torch.inf)
    _keep_typical(scaled, samplers)
    steps: list[Any] = [TemperatureLogitsWarper(float(params.get("temperature", 1.0)))]
    if "top_k" in more:
        steps.append(TopKLogitsWarper(20))
    if "top_p" in more:
        steps.append(TopPLogitsWarper(0.8))
    if "min_p" in more:
        steps.append(MinPLogitsWarper(0.05))
    for row in range(12):
        wanted = LogitsProcessorList(steps + ([TypicalLogitsWarper(typical)] if row % 3 else []))
        expected = wanted(torch.tensor([[1]]), raw[row : row + 1].clone())[0]
        assert torch.equal(scaled[row].isfinite(), expected.isfinite()), row


def test_every_parameter_is_the_same_whatever_the_batch() -> None:
    """Rows drawn together and alone agree, with everything switched on somewhere."""
    wants: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "temperature": 0.8},
        {"typical_p": 0.4},
        {"bad_words": ((3,), (1, 4)), "temperature": 0},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.7},
        {"logit_bias": {5: 8.0}, "min_p": 0.1},
        {"repetition_penalty": 2.0, "typical_p": 0.9, "top_k": 7, "logprobs": 2},
        {},
    ]
    raw = logits(len(wants), seed=9)
    samplers = [sampler([1, 2], [4, 1], seed=40 + i, **want) for i, want in enumerate(wants)]
    together = sample(raw.clone(), samplers)
    alone = [sample(raw[i : i + 1].clone(), [one])[0] for i, one in enumerate(samplers)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
