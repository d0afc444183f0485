"""Weights → 8 and 4 bits without data: a scale per group of 32, searched for where that pays.

int8: d = largest magnitude ÷ 127. int4: for several ranges of a group codes are rounded, factor and offset refitted to
them by least squares, and the best are kept; an error in w counts w² + the row's mean w². Then factors and offsets of
8 groups become bytes under a shared half each, and codes are rounded once more to what that left.
Searching and refitting is what llama.cpp's k-quants and HQQ (Badri & Shaji 2023) do; scales that are quantised
themselves: QLoRA (Dettmers et al. 2023, arXiv:2305.14314 §3).

Bounds per weight, in a group from lo = min(0, least) to hi = max(0, largest), beside bfloat16's rounding of 2^-9 |w|:
int8: max(-lo, hi) / 250 + 3e-8; int4: (hi - lo) / 3, and in root mean square over a normal distribution 0.09 of its
deviation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from workers.model.quant.matrix import CUDA_ROWS, GROUP, Q4K, Q8, SUPER, Quantised, cat

LARGEST = 1e6
"""Of a weight: beyond it a half cannot hold the scale."""
SHRINKS = (1.0, 0.93, 0.86, 0.79)
"""Parts of a group's range that are tried: a smaller one cuts the extremes off and rounds the rest finer."""
_CACHED = 1 << 16
"""Weights that are worked on at a time: their fp32 copies stay in a core's cache."""


class RangeError(ValueError):
    """A weight is not finite, or too large for the scales."""


def int8(weight: Tensor) -> Quantised:
    """weight [rows, columns] of any floating type → q8. Raises RangeError."""
    return _in_parts(weight, _int8)


def int4(weight: Tensor) -> Quantised:
    """weight [rows, columns] of any floating type → q4k. Raises RangeError."""
    return _in_parts(weight, _int4)


def check(weight: Tensor) -> None:
    """Raises RangeError for a weight that has no scale."""
    if not weight.abs().amax() <= LARGEST:  # also when it is NaN
        raise RangeError(f"a weight is not finite or beyond {LARGEST:.0e}")


def _in_parts(weight: Tensor, quantise: Callable[[Tensor, int], Quantised]) -> Quantised:
    rows, columns = weight.shape
    step = max(1, (CUDA_ROWS if weight.is_cuda else _CACHED) // columns)
    made = []
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        check(part)
        made.append(quantise(pad(part, (0, -columns % GROUP)).view(len(part), -1, GROUP), columns))
    return cat(made)


def _half_up(x: Tensor) -> Tensor:
    """The half above ``x`` or one beyond it, so that nothing that is divided by it exceeds its code's range."""
    return (x * (1 + 2**-10) + 2**-25 * (x > 0)).half()


def quotient(x: Tensor, by: Tensor) -> Tensor:
    """x ÷ by, 0 where that is 0."""
    return torch.where(by > 0, x / by, 0.0)


def _int8(x: Tensor, columns: int) -> Quantised:
    """x fp32 [rows, groups, 32]."""
    d = _half_up(x.abs().amax(-1) / 127)
    codes = quotient(x, d.float()[..., None]).round_().to(torch.int8)
    return Quantised(Q8, columns, codes.view(len(x), -1), (d,))


def _int4(x: Tensor, columns: int) -> Quantised:
    """x fp32 [rows, groups, 32]."""
    importance = x.square()
    importance += importance.mean((1, 2), keepdim=True)
    parts = grid(x, importance)
    scale, shift = lines(parts)
    codes = quotient(x - shift[..., None], scale[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return packed(codes.view(len(x), -1), columns, parts)


def grid(x: Tensor, importance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scales of q4k that suit x fp32 [rows, groups, 32] best, an error in a weight counting ``importance`` (>= 0,
    of a shape that stretches to that of x)."""
    every, step = importance.expand_as(x), max(1, (CUDA_ROWS if x.is_cuda else _CACHED) // (x.shape[1] * GROUP))
    parts = [_search(x[at : at + step], every[at : at + step]) for at in range(0, len(x), step)]
    d, m = (torch.cat(found) for found in zip(*parts, strict=True))
    (factor, a), (offset, b) = _nested(d), _nested(-m)
    return factor, offset, a, b


def lines(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Factor and offset fp32 [rows, groups] that ``grid``'s scales stand for."""
    factor, offset = Q4K.scales(*parts)
    assert offset is not None
    return factor, offset


def packed(codes: Tensor, columns: int, parts: tuple[Tensor, ...]) -> Quantised:
    """q4k of codes uint8 [rows, groups x 32], one in a byte."""
    return Quantised(Q4K, columns, codes[:, ::2] | codes[:, 1::2] << 4, parts)


def _nested(x: Tensor) -> tuple[Tensor, Tensor]:
    """x >= 0 [rows, groups] → half [rows, supers] and bytes [rows, groups] whose product is nearest to it."""
    groups = x.shape[1]
    top = _half_up(pad(x, (0, -groups % SUPER)).view(len(x), -1, SUPER).amax(-1) / 255)
    spread = top.float().repeat_interleave(SUPER, 1)[:, :groups]
    return top, quotient(x, spread).round_().to(torch.uint8)


def _search(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Factor d >= 0 and offset m <= 0 [rows, groups] of x [rows, groups, 32] with the least weighted error."""
    low, high = x.amin(-1).clamp_(max=0), x.amax(-1).clamp_(min=0)
    sums, sum_x = weight.sum(-1), (weight * x).sum(-1)
    best_d, best_m = (high - low) / 15, low
    best = torch.full_like(low, torch.inf)
    for part in SHRINKS:
        d = (high - low) * (part / 15)
        q = quotient(x - (low * part)[..., None], d[..., None]).round_().clamp_(0, 15)
        d, m = _fitted(weight * q, q, x, sums, sum_x, (d, low * part))
        error = (weight * torch.addcmul(m[..., None] - x, q, d[..., None]).square_()).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        best_d, best_m = torch.where(better, d, best_d), torch.where(better, m, best_m)
    return best_d, best_m


def _fitted(
    wq: Tensor, q: Tensor, x: Tensor, sums: Tensor, sum_x: Tensor, unfitted: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """d and m <= 0 of least weighted squared error of d q + m from x, where codes q are given (wq: weighted).

    ``unfitted`` where all codes are equal, so that any line through them fits.
    """
    sum_q, sum_qq, sum_qx = wq.sum(-1), (wq * q).sum(-1), (wq * x).sum(-1)
    det = sums * sum_qq - sum_q.square()
    sound = det > 1e-5 * sums * sum_qq
    d = torch.where(sound, (sums * sum_qx - sum_q * sum_x) / det, unfitted[0])
    m = torch.where(sound, (sum_qq * sum_x - sum_q * sum_qx) / det, unfitted[1])
    return torch.where(m > 0, quotient(sum_qx, sum_qq), d).clamp_(min=0), m.clamp_(max=0)
