"""Sampling against plain reference implementations, and what it must never depend on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from workers.engine.plan import SequenceFault
from workers.engine.sequence import Sequence
from workers.model.sampler import _cut, sample
from workers.protocol import SamplingParams

VOCAB = 50


def sampler(*, output: tuple[int, ...] = (), seed: int = 0, eos: tuple[int, ...] = (), **params: Any) -> Sequence:
    """A sequence of a three-token prompt and ``output``."""
    return Sequence("s", 0, [1, 2, 3, *output], 3, 100, SamplingParams(**params), seed=seed, eos=frozenset(eos))


def draw(row: torch.Tensor, params: dict[str, Any], seeds: range) -> np.ndarray:
    """Tokens drawn from one row of logits under many seeds, in one batch."""
    batch = row.repeat(len(seeds), 1)
    return np.array([one.tokens[0] for one in sample(batch, [sampler(seed=seed, **params) for seed in seeds])])


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after temperature, top_k, top_p and min_p, token by token."""
    scaled = [float(logit) / temperature for logit in logits]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if top_k:
        order = order[:top_k]
    kept, mass, total = [], 0.0, sum(weights[token] for token in order)
    for token in order:
        if kept and mass >= top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= min_p * max(weights)]
    result = np.zeros(len(weights))
    for token in kept:
        result[token] = weights[token] / sum(weights[other] for other in kept)
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.3, 10, 0.7, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.9, 12, 0.9, 0.05),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square over 20,000 draws, and nothing outside the allowed set."""
    row = torch.from_numpy(np.random.default_rng(3).normal(size=VOCAB).astype(np.float32) * 1.5)
    wanted = reference(row.numpy(), temperature, top_k, top_p, min_p)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    counts = np.bincount(draw(row, params, range(20_000)), minlength=VOCAB)
    assert counts[wanted == 0].sum() == 0
    big = wanted * 20_000 >= 5
    expected = np.append(wanted[big], wanted[~big].sum()) * 20_000
    found = np.append(counts[big], counts[~big].sum())
    expected, found = expected[expected > 0], found[expected > 0]
    chi2, freedom = float(((found - expected) ** 2 / expected).sum()), len(expected) - 1
    # Wilson-Hilferty: the cube root of chi2/freedom is nearly normal; 3.1 deviations are p = 0.001.
    deviation = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviation < 3.1


def test_allowed_sets_equal_the_reference() -> None:
    """Random rows and parameters: exactly the tokens that the reference keeps; wide rows go through every stage."""
    random = np.random.default_rng(5)
    for case in range(60):
        vocab = 3000 if case % 3 == 0 else VOCAB
        flat = 0.2 if case % 2 else 3.0  # nearly uniform rows need more candidates than the first look takes
        row = (random.normal(size=vocab) * flat).astype(np.float32)
        top_k = int(random.integers(0, 40)) if case % 4 else 0
        top_p, min_p = float(random.choice([1.0, 0.0, 0.3, 0.9, 0.999])), float(random.choice([0.0, 0.0, 0.02, 1.0]))
        temperature = float(random.choice([0.3, 1.0, 2.0]))
        wanted = reference(row, temperature, top_k, top_p, min_p) > 0
        scaled = torch.from_numpy((row - row.max()) / np.float32(temperature))[None]
        cut = _cut(scaled, [sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)])
        kept = (scaled >= cut[:, None])[0].numpy()
        differing = np.flatnonzero(kept != wanted)
        # The mass at the edge is summed in another order: one token may fall on the other side of top_p.
        assert len(differing) <= (0 < top_p < 1), (case, differing)


def test_equal_logits_at_the_cut_all_stay() -> None:
    row = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert set(draw(row, {"temperature": 1.0, "top_k": 2}, range(2000)).tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_best_and_ignores_the_seed() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    wanted = logits.argmax(-1).tolist()
    found = sample(logits, [sampler(seed=seed, temperature=0.0, top_p=0.1) for seed in range(6)])
    assert [one.tokens for one in found] == [[token] for token in wanted]


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    row = torch.tensor([5.0, 5.1, -1e30, 4.0])
    assert set(draw(row, {"temperature": 1e-40}, range(50)).tolist()) == {1}


def test_result_does_not_depend_on_the_batch() -> None:
    """Every sampler alone, in a crowd and in reverse order: bit-equal tokens and log probabilities."""
    logits = torch.randn(12, 400, generator=torch.Generator().manual_seed(2)) * 2
    crowd = [
        sampler(seed=row, output=tuple(range(row)), temperature=(0.0, 0.8, 1.2)[row % 3], top_k=(0, 7)[row % 2],
                top_p=(1.0, 0.9)[row % 4 // 2], min_p=(0.0, 0.01)[row % 5 // 4], logprobs=(None, 3)[row % 2],
                frequency_penalty=(0.0, 0.5)[row % 7 // 6], logit_bias={4: 2.0} if row % 6 == 5 else {})
        for row in range(12)
    ]  # fmt: skip
    together = sample(logits.clone(), crowd)
    backwards = sample(logits.flip(0).clone(), crowd[::-1])[::-1]
    alone = [sample(logits[row : row + 1].clone(), [one])[0] for row, one in enumerate(crowd)]
    assert together == backwards == alone


def test_a_draw_is_repeated_at_the_same_position_and_differs_at_others() -> None:
    row = torch.zeros(1, 1000)
    tokens = [sample(row.clone(), [sampler(seed=9, output=(5,) * length)])[0].tokens[0] for length in (4, 4, 5, 6)]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3


def test_penalties_bias_and_early_ends() -> None:
    logits = torch.zeros(5, VOCAB)
    logits[:, 10], logits[:, 11], logits[:, 12] = 3.0, 2.5, 2.0
    found = sample(
        logits,
        [
            sampler(temperature=0.0, output=(10,), presence_penalty=0.8),
            sampler(temperature=0.0, output=(10, 10, 11), frequency_penalty=0.6),
            sampler(temperature=0.0, logit_bias={10: -100.0, 40: 2.6, 999: 100.0, -1: 100.0}),
            sampler(temperature=0.0, output=(7,), min_tokens=2, eos=(10,), stop_token_ids=(11,)),
            sampler(temperature=0.0, output=(7, 8), min_tokens=2, eos=(10,), stop_token_ids=(11,)),
        ],
    )
    # 10 falls to 2.2 behind 11; then 10 to 1.8 and 11 to 1.9, so 12; 10 banned and 40 lifted; both ends banned; none.
    assert [one.tokens[0] for one in found] == [11, 12, 40, 12, 10]


def test_min_tokens_with_ignore_eos_leaves_the_end_token_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 10] = 1.0
    one = sampler(temperature=0.0, min_tokens=5, ignore_eos=True, eos=(10,))
    assert sample(logits, [one])[0].tokens == [10]


@pytest.mark.parametrize("penalty", [1e-45, 1e-300])
def test_a_penalty_of_next_to_nothing_is_no_infinity(penalty: float) -> None:
    """What it lifts is as likely as can be; nothing could be drawn where one token is infinitely so."""
    row = torch.tensor([0.5, -1.0, 2.0, 3.0, -math.inf, 0.0])
    one = {"temperature": 1.0, "output": (2, 3, 4), "repetition_penalty": penalty}
    assert set(draw(row, one, range(50)).tolist()) == {2, 3}


def test_penalties_count_output_and_not_the_prompt() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 0.5  # token 1 is in the prompt
    assert sample(logits, [sampler(temperature=0.0, presence_penalty=2.0)])[0].tokens == [1]


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    exact = logits.double().log_softmax(-1)
    samplers = [
        sampler(temperature=0.0, logprobs=4, logit_bias={3: 50.0}),
        sampler(temperature=0.5, logprobs=0, top_k=1),
    ]
    biased, plain = sample(logits.clone(), samplers)
    (report,) = biased.logprobs
    assert report.token == biased.tokens[0] == 3
    assert report.logprob == pytest.approx(float(exact[0, 3]), abs=1e-5)
    best = exact[0].topk(4)
    assert [token for token, _ in report.top] == best.indices.tolist()
    assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert plain.logprobs[0].top == []
    assert plain.logprobs[0].logprob == pytest.approx(float(exact[1].max()), abs=1e-5)


def test_single_broken_logits_cost_nothing() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 5] = 8.0
    logits[0, 6], logits[1, 6], logits[2, 6], logits[3, 7] = math.nan, math.nan, math.inf, -math.inf
    samplers = [sampler(temperature=0.0), sampler(temperature=0.01), sampler(temperature=1.0), sampler(temperature=0.0)]
    assert [one.tokens[0] for one in sample(logits, samplers)] == [5, 5, 6, 5]


def test_a_row_without_a_finite_logit_names_its_sampler() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1] = math.nan
    samplers = [sampler() for _ in range(3)]
    with pytest.raises(SequenceFault, match="no finite logit") as caught:
        sample(logits, samplers)
    assert caught.value.sequences == (samplers[1],)


def test_no_samplers_no_tokens() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []
