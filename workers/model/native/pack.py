"""Weights and cache in the kernel's layouts (``linear.h``, ``attention.h``), in huge pages where there are any."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from workers.model.native.abi import Linear

PANEL = 32
LANES = 16
_HUGE = 2 << 20


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


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up [ffn, hidden] → [2 ffn, hidden]: 16 gate rows, then their 16 up rows, as the gated epilogue reads."""
    ffn, hidden = gate.shape
    return torch.stack([gate.view(-1, LANES, hidden), up.view(-1, LANES, hidden)], dim=1).reshape(2 * ffn, hidden)


def gated_bias(gate: Tensor, up: Tensor) -> Tensor:
    """Their biases [ffn] in the same order → [2 ffn]."""
    return torch.stack([gate.view(-1, LANES), up.view(-1, LANES)], dim=1).reshape(-1)


def padded_bias(bias: Tensor) -> Tensor:
    """bias [n] → fp32, zero for the columns that ``panels`` adds."""
    made = torch.zeros(-(-len(bias) // PANEL) * PANEL)
    made[: len(bias)] = bias
    return made


def linear(packed: Tensor, k: int, bias: Tensor | None = None) -> Linear:
    """The structure over packed weights and a padded bias. The caller keeps both tensors alive."""
    return Linear(w=packed.data_ptr(), bias=None if bias is None else bias.data_ptr(), n=packed.numel() // k, k=k)
