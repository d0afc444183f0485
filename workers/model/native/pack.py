"""Weights and cache in the kernel's layouts (``linear.h``, ``attention.h``), in huge pages where there are any."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.native.abi import Linear
from workers.model.quant.matrix import GROUP, Q4, Q4K, Q8, Q8_0, SUPER, Matrix, Quantised, Stacked, joined

PANEL = 32
LANES = 16
_HUGE = 2 << 20
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14."""
KINDS = {Q8_0: 1, Q4: 2, Q4K: 3, Q8: 4}
"""``Kind`` of quantised.h."""
FOLDED = 5
"""The same of folded bfloat16 weights."""


def buffer(count: int, dtype: torch.dtype) -> Tensor:
    """A zeroed 1-D tensor in anonymous memory, aligned to and advised for huge pages (weights then stream at 40 GB/s
    instead of 28: a page walk per 4 KiB is what limits them)."""
    size = count * dtype.itemsize
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)  # the tensor keeps the mapping alive
    start = -raw.data_ptr() % (_HUGE if size >= _HUGE else 64)
    return raw[start : start + size].view(dtype)


def touch(part: Tensor) -> bool:
    """Have the system find memory under ``part``, as a write would; its content stays. False: it cannot."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if madvise is None:
        return False
    begin = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = part.data_ptr() + part.nbytes - begin
    return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _POPULATE_WRITE) == 0)


def panels(weight: Tensor) -> Tensor:
    """weight [n, k] → [n/32][k/K][2][16][K] with K = 2 for bf16 and 1 for fp32; n is padded with zero columns."""
    n, k = weight.shape
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    padded = -(-n // PANEL) * PANEL
    packed = buffer(padded * k, weight.dtype)
    if padded != n:
        weight = torch.cat([weight, weight.new_zeros(padded - n, k)])
    shape = (padded // PANEL, k // pair, 2, LANES, pair)
    packed.view(shape).copy_(weight.view(padded // PANEL, 2, LANES, k // pair, pair).permute(0, 3, 1, 2, 4))
    return packed


def quantised(weight: Quantised, dtype: torch.dtype) -> Tensor:
    """weight [n, k] → uint8 panels of ``quantised.h``, for a kernel that computes in ``dtype``; n is padded."""
    n, _ = weight.shape
    extra = -n % PANEL
    if extra:
        weight = weight.rows(lambda part: torch.cat([part, part.new_zeros(extra, *part.shape[1:])]))
    count = (n + extra) // PANEL
    pair = 2 if dtype == torch.bfloat16 else 1
    codes = weight.unpacked().view(count, 2, LANES, -1, GROUP // pair, pair).permute(0, 3, 4, 1, 2, 5)
    groups = codes.shape[1]
    if weight.format.bits == 4:  # 8 vectors of 16 codes → 16 words, vector i in bits 4i to 4i + 3
        eight = codes.reshape(count, groups, -1, 4, 2, LANES)
        codes = (eight[..., 0, :] | eight[..., 1, :] << 4).transpose(-1, -2)
    body = codes.reshape(count, groups, -1).view(torch.uint8)
    parts = [part.view(count, PANEL, -1).transpose(1, 2).contiguous().view(torch.uint8) for part in weight.parts]
    if weight.format is Q4K:
        heads, body = torch.cat(parts[:2], -1), torch.cat([*parts[2:], body], -1)
        pieces = [
            piece
            for at in range(heads.shape[1])
            for piece in (heads[:, at], body[:, at * SUPER : (at + 1) * SUPER].reshape(count, -1))
        ]
        whole = torch.cat(pieces, 1)
    else:
        whole = torch.cat([*parts, body], -1)
    packed = buffer(whole.numel(), torch.uint8)
    packed.copy_(whole.reshape(-1))
    return packed


def gated(gate: Tensor | Quantised, up: Tensor | Quantised, dtype: torch.dtype) -> Tensor | Quantised:
    """gate and up [ffn, hidden] → [2 ffn, hidden]: 16 gate rows, then their 16 up rows, as the gated epilogue reads.

    In ``dtype`` where their formats differ.
    """
    both = joined([gate, up])
    if isinstance(both, Stacked):
        both = both.dense(dtype)
    return both.rows(_interleaved) if isinstance(both, Quantised) else _interleaved(both)


def _interleaved(both: Tensor) -> Tensor:
    return both.view(2, -1, LANES, both.shape[-1]).transpose(0, 1).reshape(both.shape)


def gated_bias(gate: Tensor, up: Tensor) -> Tensor:
    """Their biases [ffn] in the same order → [2 ffn]."""
    return torch.stack([gate.view(-1, LANES), up.view(-1, LANES)], dim=1).reshape(-1)


def padded_bias(bias: Tensor) -> Tensor:
    """bias [n] → fp32, zero for the columns that ``panels`` adds."""
    made = torch.zeros(-(-len(bias) // PANEL) * PANEL)
    made[: len(bias)] = bias
    return made


@dataclass(frozen=True, slots=True)
class Packed:
    """Panels in the kernel's layout, those of one kind before those of another where there are two."""

    memory: Tensor
    runs: tuple[tuple[int, int, int], ...]
    """One or two: ``Kind``, panels, bytes of a panel."""
    starts: Tensor | None = None
    """Where panels begin that differ in size, and the last ends; int64."""

    @property
    def nbytes(self) -> int:
        """What the kernel reads."""
        return self.memory.nbytes + (0 if self.starts is None else self.starts.nbytes)


def packed(weight: Matrix, dtype: torch.dtype) -> Packed:
    """weight [n, k] for a kernel that computes in ``dtype``. What changes its format within a panel becomes dense."""
    if isinstance(weight, Stacked) and (len(weight.layers) > 2 or len(weight.layers[0].codes) % PANEL):
        weight = weight.dense(dtype)
    if isinstance(weight, Tensor):
        made = panels(weight)
        return Packed(made, (_run(0, len(weight), made),))
    layers = weight.layers if isinstance(weight, Stacked) else (weight,)
    pieces = [quantised(one, dtype) for one in layers]
    runs = tuple(_run(KINDS[one.format], len(one.codes), piece) for one, piece in zip(layers, pieces, strict=True))
    memory = pieces[0]
    if len(pieces) > 1:
        memory = buffer(sum(piece.nbytes for piece in pieces), torch.uint8)
        torch.cat(pieces, out=memory)
    return Packed(memory, runs)


def folded(dense: Packed, k: int, fold: Callable[..., int]) -> Packed:
    """Dense bfloat16 panels in 12 bits a weight, exactly (``folded.h``); others, and those it would not make much
    smaller, as they are. ``fold``: the kernel's."""
    ((kind, panels, _), *others) = dense.runs
    if kind or others or dense.memory.dtype != torch.bfloat16:
        return dense
    most = fold(None, panels, k, None, None)
    if not most:
        return dense
    room = buffer(most, torch.uint8)  # what is not written to takes no memory
    starts = torch.empty(panels + 1, dtype=torch.int64)
    size = fold(dense.memory.data_ptr(), panels, k, room.data_ptr(), starts.data_ptr())
    return Packed(room[:size], ((FOLDED, panels, 0),), starts) if size else dense


def _run(kind: int, rows: int, made: Tensor) -> tuple[int, int, int]:
    count = -(-rows // PANEL)
    return kind, count, made.nbytes // count


def linear(made: Packed, k: int, bias: Tensor | None = None) -> Linear:
    """The structure over packed weights and a padded bias. The caller keeps both tensors alive."""
    (kind, first, stride), (later_kind, _, later_stride) = made.runs[0], made.runs[-1]
    return Linear(
        w=made.memory.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        n=sum(count for _, count, _ in made.runs) * PANEL,
        k=k,
        kind=kind,
        stride=stride,
        first=first,
        later_kind=later_kind,
        later_stride=later_stride,
        starts=None if made.starts is None else made.starts.data_ptr(),
    )
