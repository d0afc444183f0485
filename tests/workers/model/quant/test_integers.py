"""int8 codes times inputs in block floating point (``native/fixed.h``): how far from the product in real numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.model.native.by_hand import table
from tests.workers.model.quant import head
from tests.workers.model.quant.formats import FORMATS, Rounded, kernel_of
from workers.model.quant.matrix import GROUP


@pytest.mark.parametrize("case", head.SCALES)
def test_it_stays_within_its_bound(case: str, tmp_path: Path) -> None:
    """Weights are not rounded at all; an input by 2^-15 of its group's largest, or not where it is within 2^-7 of that,
    and never to less than 2^-100; the sums of groups are added up in fp32. With weights rounded to bfloat16 most would
    be further off."""
    folder = head.write(tmp_path, head.SCALES[case])
    x, matrix = head.factors(folder)
    weight = (matrix.codes.double().view(300, -1, GROUP) * matrix.parts[0].double()[..., None]).view(300, -1)
    peaks = x.view(len(x), -1, GROUP).abs().amax(-1).repeat_interleave(GROUP, 1)
    rounded = x.abs() < peaks * 2**-head.EXACT
    assert bool(rounded.any()) == (case != "alike")
    sums = 2**-24 * (2 + x.shape[1] // GROUP) * x.abs() @ weight.abs().T
    bound = sums + (peaks * rounded * 2**-15).clamp(min=2**-101) @ weight.abs().T
    assert bool(((head.logits(folder) - x @ weight.T).abs() <= bound).all())
    if case == "alike":
        assert bool(((x @ matrix.dense(torch.float64).T - x @ weight.T).abs() > bound).float().mean() > 0.3)


@pytest.mark.parametrize("name", ["q8", "q8_0"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_every_output(name: str, bad: float, tmp_path: Path) -> None:
    """Of that row: a request fails instead of going on with numbers that mean nothing."""
    scales = head.SCALES["far apart"].clone()
    scales[GROUP + 3] = bad
    kernel = kernel_of(head.write(tmp_path, scales), torch.bfloat16, Rounded(FORMATS[name]))
    assert not kernel.run(([7, 8, 9], 0, table(3, 1))).isfinite().any()
