"""Loads: the same for the same seed, distinct prompts, and the same after a trip through JSON."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench import load
from gateway.bench.load import Load

VOCAB = 5000


def test_no_two_requests_begin_alike_also_across_runs() -> None:
    """A prefix cache cannot fake speed: not one block of 8 tokens is shared, not even between repetitions."""
    runs = [load.uniform(f"run/{seed}", 64, 40, 4, VOCAB, 8) for seed in range(4)]
    beginnings = [request.tokens[:8] for run in runs for request in run.requests]
    assert len(set(beginnings)) == len(beginnings) == 256


def test_prompts_leave_control_tokens_out_and_are_reproducible() -> None:
    tokens = load.prompt("x", 4000, VOCAB)
    assert min(tokens) >= 500
    assert max(tokens) < 4500
    assert tokens == load.prompt("x", 4000, VOCAB)
    assert tokens != load.prompt("y", 4000, VOCAB)
    with pytest.raises(ValueError, match="at least one token"):
        load.prompt("x", 0, VOCAB)


def test_a_load_survives_json() -> None:
    made = load.interrupted("i", VOCAB, stream=(8, 20), prompts=3, length=50, at_token=4)
    assert Load.from_json(json.loads(json.dumps(made.to_json()))) == made
    closed = load.uniform("u", 3, 5, 6, VOCAB, 2)
    assert Load.from_json(json.loads(json.dumps(closed.to_json()))) == closed
    assert closed.longest == 11


def test_interrupting_prompts_wait_for_a_token_of_the_stream() -> None:
    first, *others = load.interrupted("i", VOCAB, stream=(8, 20), prompts=3, length=50, at_token=4).requests
    assert first.after is None
    assert [other.after for other in others] == [(first.id, 4)] * 3


def test_a_common_prefix_is_all_that_is_common() -> None:
    requests = load.common_prefix("p", 3, 64, 16, 2, VOCAB).requests
    assert len({request.tokens[:64] for request in requests}) == 1
    assert len({request.tokens[64:] for request in requests}) == 3


def test_a_burst_stays_within_its_ranges() -> None:
    requests = load.burst("b", 300, (8, 32), (16, 96), VOCAB).requests
    inputs, outputs = {len(r.tokens) for r in requests}, {r.max_tokens for r in requests}
    assert (min(inputs), max(inputs)) == (8, 32)
    assert (min(outputs), max(outputs)) == (16, 96)
    assert all(request.at == 0 for request in requests)


def test_poisson_arrivals() -> None:
    times = load.poisson(5.0, 4000, "seed")
    between = [after - before for before, after in itertools.pairwise(times)]
    assert min(between) >= 0
    assert statistics.mean(between) == pytest.approx(0.2, rel=0.08)
    assert statistics.stdev(between) == pytest.approx(0.2, rel=0.1)
    assert times == load.poisson(5.0, 4000, "seed")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 300))
def test_dealing_is_never_off_by_more_than_one(weights: list[int], count: int) -> None:
    deal = load.dealt(weights)
    given_out = [0] * len(weights)
    for _ in range(count):
        given_out[deal()] += 1
    for weight, got in zip(weights, given_out, strict=True):
        assert abs(got - count * weight / sum(weights)) <= len(weights)
