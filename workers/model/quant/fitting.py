"""Weights → q4k with data: codes chosen so that a linear's outputs move least, over the inputs that it was shown.

GPTQ (Frantar et al. 2023, arXiv:2210.17323 §3): inputs are rounded one after the other, those with the most energy
first, and what each loses is made up for by those still to come, as the inputs' second moments H say. With U the upper
Cholesky factor of H's inverse, an error e in input i moves each later input j by -e U_ij / U_ii. Ranges and offsets
of the groups are searched for beforehand, an error counting as much as its input has energy.

Rows are independent. A row that came out worse than ``rounding.int4`` makes it, over the same inputs, is that one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from workers.model.quant.matrix import GROUP, Quantised
from workers.model.quant.rounding import grid, int4, lines, packed, quotient

DAMPING = 0.01
"""Of the mean energy, added to every input's: keeps what the text did not show from being given away."""
_STIFFER = (1.0, 10.0, 100.0)
"""Times ``DAMPING``, where less leaves no definite matrix."""
_BLOCK = 64
"""Inputs whose errors are passed on among themselves at once, and to all others together."""


def fitted(weight: Tensor, moments: Tensor) -> Quantised:
    """weight fp32 [rows, columns], moments fp32 [columns, columns] = sum of x xᵀ over the inputs x → q4k.

    Raises RangeError for a weight that has no scale. Moments that are not finite are as none.
    """
    plain = int4(weight)
    factor = _factor(moments)
    if factor is None:
        return plain
    order, upper = factor
    made = _solved(weight, moments.diagonal(), order, upper)
    return _chosen(_worse(made, plain, weight, moments), plain, made)


def _factor(moments: Tensor) -> tuple[Tensor, Tensor] | None:
    """Order of the inputs, and U in that order; None where the inputs say nothing."""
    energy = moments.diagonal()
    mean = energy.mean()
    if not (torch.isfinite(moments).all() and mean > 0):
        return None
    order = energy.argsort(descending=True, stable=True)
    for times in _STIFFER:
        damped = moments[order][:, order]
        damped.diagonal().add_(mean * (DAMPING * times))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return order, upper
    return None


def _solved(weight: Tensor, energy: Tensor, order: Tensor, upper: Tensor) -> Quantised:
    rows, columns = weight.shape
    importance = pad(energy + energy.mean() * DAMPING, (0, -columns % GROUP)).view(1, -1, GROUP)
    parts = grid(pad(weight, (0, -columns % GROUP)).view(rows, -1, GROUP), importance)
    scale, shift = (part.T.contiguous() for part in lines(parts))
    inverse = quotient(torch.ones_like(scale), scale)
    group, pivots = (order // GROUP).tolist(), upper.diagonal().tolist()
    left = weight.T[order]  # [columns, rows], what is still to be rounded, errors made up for
    codes = torch.empty_like(left)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        block, among = left[begin:end], upper[begin:end, begin:end]
        errors = torch.empty_like(block)
        for i in range(end - begin):
            one, code, error = group[begin + i], codes[begin + i], errors[i]
            torch.sub(block[i], shift[one], out=code).mul_(inverse[one]).round_().clamp_(0, 15)
            torch.addcmul(shift[one], code, scale[one], out=error)
            torch.sub(block[i], error, out=error).div_(pivots[begin + i])
            block[i + 1 :].addr_(among[i, i + 1 :], error, alpha=-1)
        left[end:].addmm_(upper[begin:end, end:].T, errors, alpha=-1)
    placed = torch.zeros(rows, columns + -columns % GROUP, dtype=torch.uint8, device=weight.device)
    placed[:, order] = codes.T.to(torch.uint8)
    return packed(placed, columns, parts)


def _worse(one: Quantised, other: Quantised, weight: Tensor, moments: Tensor) -> Tensor:
    """[rows]: whether ``one`` changes the outputs more, squares added over all inputs.

    a H aᵀ - b H bᵀ = (a - b) H (a + b)ᵀ, since H is symmetric: one product with it instead of two.
    """
    first, second = one.dense(torch.float32), other.dense(torch.float32)
    return (((first - second) @ moments) * (first + second - 2 * weight)).sum(1) > 0


def _chosen(first: Tensor, one: Quantised, other: Quantised) -> Quantised:
    """Rows of ``one`` where ``first`` [rows], else of ``other``."""
    tensors = [torch.where(first[:, None], yes, no) for yes, no in zip(one.tensors(), other.tensors(), strict=True)]
    return Quantised(one.format, one.columns, tensors[0], tuple(tensors[1:]))
