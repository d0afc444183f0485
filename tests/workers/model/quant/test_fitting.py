"""Fitting codes to inputs: never worse than rounding over them, clearly better where inputs hang together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.model.quant.test_rounding import SPREADS, weights
from workers.model.quant.fitting import fitted
from workers.model.quant.matrix import Quantised
from workers.model.quant.rounding import RangeError, int4


def inputs(seed: int, count: int, columns: int, rank: int) -> Tensor:
    """[count, columns], mixed from ``rank`` numbers each: the fewer, the more they have in common."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    return mixed / rank**0.5 + 0.1 * torch.randn(count, columns, generator=generator)


def lost(made: Quantised, weight: Tensor, x: Tensor) -> Tensor:
    """[rows]: squared change of the outputs."""
    return (x.double() @ (made.dense(torch.float64) - weight.double()).T).square().sum(0)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 20),
    columns=st.sampled_from([4, 16, 32, 48, 64, 272, 528]),
    count=st.integers(1, 200),
    kind=st.sampled_from(sorted(SPREADS)),
)
def test_no_row_loses_more_than_rounding_does(seed: int, rows: int, columns: int, count: int, kind: str) -> None:
    """Whatever the weights, however few the inputs, where groups end and where they do not."""
    weight, x = weights(seed, rows, columns, kind), inputs(seed + 1, count, columns, 8)
    made, plain = fitted(weight, x.T @ x), int4(weight)
    assert made.shape == (rows, columns)
    assert made.nbytes == plain.nbytes
    before = lost(plain, weight, x)
    slack = 1e-4 * before + 1e-6 * (x.double() @ weight.double().T).square().sum(0)  # moments are fp32
    assert (lost(made, weight, x) <= before + slack).all()


def test_inputs_that_hang_together_lose_much_less() -> None:
    """Those that it was shown, and others of their kind."""
    weight, every = weights(5, 64, 512, "normal"), inputs(6, 8192, 512, 64)
    shown, others = every[:4096], every[4096:]
    made, plain = fitted(weight, shown.T @ shown), int4(weight)
    assert lost(made, weight, shown).sum() < 0.5 * lost(plain, weight, shown).sum()
    assert lost(made, weight, others).sum() < 0.6 * lost(plain, weight, others).sum()


@pytest.mark.parametrize("nothing", [0.0, float("nan"), float("inf")])
def test_moments_that_say_nothing_leave_plain_rounding(nothing: float) -> None:
    weight, moments = weights(7, 8, 64, "normal"), torch.eye(64)
    moments[3, 3] = nothing
    if not nothing:
        moments.zero_()
    assert all(map(torch.equal, fitted(weight, moments).tensors(), int4(weight).tensors()))


def test_zeros_stay_zeros_and_constants_what_they_are() -> None:
    x = inputs(8, 100, 64, 8)
    assert not fitted(torch.zeros(3, 64), x.T @ x).dense().any()
    for value in (0.5, -0.5):
        made = fitted(torch.full((3, 64), value), x.T @ x).dense(torch.float32)
        torch.testing.assert_close(made, torch.full((3, 64), value), rtol=0.01, atol=0)


def test_inputs_that_never_move_are_rounded_as_they_are() -> None:
    """A column without energy, a group without energy."""
    weight, x = weights(9, 16, 96, "normal"), inputs(10, 500, 96, 16)
    x[:, 5] = 0
    x[:, 32:64] = 0
    made = fitted(weight, x.T @ x).dense(torch.float32)
    assert ((made - weight)[:, 32:64].square().mean() / weight.square().mean()).sqrt() < 0.12
    assert (made - weight)[:, 5].abs().max() < weight.abs().max() / 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2e6])
def test_a_weight_that_no_scale_can_hold_is_refused(bad: float) -> None:
    weight = torch.zeros(40, 64)
    weight[39, 63] = bad
    with pytest.raises(RangeError, match="not finite or beyond 1e\\+06"):
        fitted(weight, torch.eye(64))
