"""How far rounding moves a weight: within the bounds that ``rounding.py`` states, whatever the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from tests.workers.model.quant.formats import FORMATS, q4
from workers.model.quant.matrix import Quantised, Stacked, joined
from workers.model.quant.rounding import RangeError, int4, int8

SPREADS = {"normal": 0.0, "outliers": 0.01, "tiny": 1e-4, "large": 300.0}


def weights(seed: int, rows: int, columns: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=generator)
    if kind == "outliers":
        made *= torch.where(torch.rand(rows, columns, generator=generator) < SPREADS[kind], 30.0, 1.0)
    elif kind in ("tiny", "large"):
        made *= SPREADS[kind]
    return made


def extremes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of each weight's group, at most and at least 0 [rows, columns]."""
    rows, columns = weight.shape
    groups = pad(weight, (0, -columns % 32)).view(rows, -1, 32)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    return low.repeat_interleave(32, 1)[:, :columns], high.repeat_interleave(32, 1)[:, :columns]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 40),
    columns=st.sampled_from([4, 16, 32, 48, 64, 272, 528]),
    kind=st.sampled_from(sorted(SPREADS)),
)
def test_no_weight_moves_further_than_stated(seed: int, rows: int, columns: int, kind: str) -> None:
    weight = weights(seed, rows, columns, kind)
    low, high = extremes(weight)
    rounded = weight.abs() * 2**-8
    for made, bound in (
        (int8(weight), torch.maximum(-low, high) / 250 + 3e-8),
        (int4(weight), (high - low) / 3 + 2e-6),
    ):
        dense = made.dense(torch.float32)
        assert dense.shape == weight.shape
        assert torch.equal(dense, dense.bfloat16().float()), "a weight is a bfloat16 number"
        assert ((dense - weight).abs() <= bound + rounded).all()


def error(made: Quantised, weight: Tensor) -> float:
    """Root mean square over the weights' deviation."""
    return float((made.dense(torch.float32) - weight).square().mean().sqrt() / weight.std())


def test_of_normal_weights_little_is_lost_and_searching_helps() -> None:
    weight = weights(5, 256, 512, "normal")
    assert error(int8(weight), weight) < 0.006
    assert error(int4(weight), weight) < 0.09
    assert error(int4(weight), weight) < 0.97 * error(q4(weight), weight), "no better than the group's own range"


def test_what_already_lies_on_a_grid_of_sixteen_stays_there() -> None:
    """The bundled model was published so: int4 gives its numbers back, but for the rounding of its scales."""
    weight = q4(weights(6, 64, 512, "normal")).dense(torch.float32)
    assert error(int4(weight), weight) < 0.02


@pytest.mark.parametrize("quantise", [int8, int4])
def test_zeros_stay_zeros_and_constants_what_they_are(quantise: Callable[[Tensor], Quantised]) -> None:
    assert not quantise(torch.zeros(3, 64)).dense().any()
    for value in (0.5, -0.5):
        torch.testing.assert_close(
            quantise(torch.full((3, 64), value)).dense(torch.float32), torch.full((3, 64), value), rtol=0.01, atol=0
        )


@pytest.mark.parametrize("quantise", [int8, int4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2e6])
def test_a_weight_that_no_scale_can_hold_is_refused(quantise: Callable[[Tensor], Quantised], bad: float) -> None:
    weight = torch.zeros(40, 64)
    weight[39, 63] = bad
    with pytest.raises(RangeError, match="not finite or beyond 1e\\+06"):
        quantise(weight)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_independent(name: str) -> None:
    """Reordered and joined they are the same rows; others are stacked behind them, or all become dense with those that
    are."""
    weight = weights(7, 40, 272, "normal")
    whole, order = FORMATS[name](weight), torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(whole.rows(lambda part: part[order]).dense(), whole.dense()[order])
    assert torch.equal(FORMATS[name](weight[order]).dense(), whole.dense()[order])
    both = joined([FORMATS[name](weight[:9]), FORMATS[name](weight[9:])])
    assert isinstance(both, Quantised)
    assert torch.equal(both.dense(), whole.dense())
    assert both.nbytes == whole.nbytes
    stacked = joined([whole, FORMATS["q8" if name != "q8" else "q4"](weight)])
    assert isinstance(stacked, Stacked)
    assert stacked.shape == (80, 272)
    assert torch.equal(stacked.dense()[:40], whole.dense())
    mixed = joined([whole, weight.bfloat16()])
    assert isinstance(mixed, Tensor)
    assert torch.equal(mixed, torch.cat([whole.dense(), weight.bfloat16()]))


@pytest.mark.parametrize(("name", "bits"), [("q8", 8.5), ("q8_0", 8.5), ("q4", 5), ("q4k", 4.625)])
def test_it_takes_the_bytes_it_says(name: str, bits: float) -> None:
    assert FORMATS[name](weights(8, 64, 512, "normal")).nbytes == 64 * 512 * bits / 8
