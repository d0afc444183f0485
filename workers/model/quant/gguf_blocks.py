"""Blocks of a GGUF file as they lie → ``Quantised``, number for number: nothing is rounded anew.

Kept: Q8_0, Q5_0 (its codes as bytes), Q4_0, Q4_1 and Q4_K. Layouts: ggml-common.h of https://github.com/ggml-org/ggml.
What these give is what dequantising gives, rounded to bfloat16 as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.quant.matrix import GROUP, Q4, Q4K, Q8_0, SUPER, Quantised

Bytes = NDArray[Any]
"""Of uint8."""


def _halves(blocks: Bytes, at: int) -> Tensor:
    """A half per block [rows, blocks, bytes] → [rows, blocks]."""
    return torch.from_numpy(blocks[..., at : at + 2].copy().view(np.float16)[..., 0])


def _pairs(low: Bytes, high: Bytes) -> Tensor:
    """Codes of the first and the second half of each group [rows, groups, 16] → two in a byte, in order."""
    codes = np.concatenate([low, high], axis=-1)
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).reshape(len(codes), -1))


def _q8_0(blocks: Bytes, columns: int) -> Quantised:
    codes = torch.from_numpy(blocks[..., 2:].copy().view(np.int8).reshape(len(blocks), -1))
    return Quantised(Q8_0, columns, codes, (_halves(blocks, 0),))


def _q5_0(blocks: Bytes, columns: int) -> Quantised:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    low = blocks[..., 6:]
    codes = np.concatenate([low & 15, low >> 4], axis=-1) | fifth << 4
    signed = torch.from_numpy((codes.astype(np.int8) - 16).reshape(len(blocks), -1))
    return Quantised(Q8_0, columns, signed, (_halves(blocks, 0),))


def _q4_0(blocks: Bytes, columns: int) -> Quantised:
    d = _halves(blocks, 0)
    return Quantised(Q4, columns, _pairs(blocks[..., 2:] & 15, blocks[..., 2:] >> 4), (d, d * -8))


def _q4_1(blocks: Bytes, columns: int) -> Quantised:
    codes = _pairs(blocks[..., 4:] & 15, blocks[..., 4:] >> 4)
    return Quantised(Q4, columns, codes, (_halves(blocks, 0), _halves(blocks, 2)))


def _q4_k(blocks: Bytes, columns: int) -> Quantised:
    """256 weights: two halves, 8 pairs of 6-bit scales in 12 bytes, codes of groups 2i and 2i + 1 in one run."""
    six = blocks[..., 4:16]
    first, second, third = six[..., :4], six[..., 4:8], six[..., 8:]
    a = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    b = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    runs = blocks[..., 16:].reshape(len(blocks), -1, 4, GROUP)
    groups = np.stack([runs & 15, runs >> 4], axis=-2).reshape(len(blocks), -1, GROUP)
    parts = (torch.from_numpy(part.reshape(len(blocks), -1)) for part in (a, b))
    codes = _pairs(groups[..., : GROUP // 2], groups[..., GROUP // 2 :])
    return Quantised(Q4K, columns, codes, (_halves(blocks, 0), _halves(blocks, 2), *parts))


KEPT: Mapping[str, tuple[int, int, Callable[[Bytes, int], Quantised]]] = {
    "Q8_0": (34, GROUP, _q8_0),
    "Q5_0": (22, GROUP, _q5_0),
    "Q4_0": (18, GROUP, _q4_0),
    "Q4_1": (20, GROUP, _q4_1),
    "Q4_K": (144, SUPER * GROUP, _q4_k),
}
"""GGUF's name of a type → bytes and weights of a block, and how it is read."""


def kept(kind: str, data: NDArray[Any], rows: int, columns: int) -> Quantised | None:
    """``data`` of a tensor [rows, columns] of type ``kind``; None where there is no kernel for it or a scale is no
    finite half."""
    if kind not in KEPT:
        return None
    size, weights, read = KEPT[kind]
    if columns % weights:
        return None
    made = read(np.asarray(data).view(np.uint8).reshape(rows, -1, size), columns)
    halves = [part for part in made.parts if part.dtype == torch.float16]
    return made if all(bool(torch.isfinite(part).all()) for part in halves) else None


def quantised_bytes(kind: str, rows: int, columns: int) -> int | None:
    """What ``kept`` makes of such a tensor, in bytes; None where it keeps none."""
    if kind not in KEPT or columns % KEPT[kind][1]:
        return None
    bits = {"Q8_0": 8.5, "Q5_0": 8.5, "Q4_K": 4.625}.get(kind, 5.0)
    return int(rows * columns * bits / 8)
