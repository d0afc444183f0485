"""Integers to the device, many arrays in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 16
"""Elements: every array begins on a 128-byte border, so that kernels see the same alignment in every step."""


def ship(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as flat int64 tensors on ``device``.

    To a GPU they go in one copy from page-locked memory that does not wait; PyTorch's host allocator keeps that memory
    until the copy is done. On a CPU they are views where they can be.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).reshape(-1)) for array in arrays]
    sizes = [-(-array.size // ALIGN) * ALIGN for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    filled = host.numpy()
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    for array, begin in zip(arrays, begins, strict=True):
        filled[begin : begin + array.size] = array.reshape(-1)
    there = host.to(device, non_blocking=True)
    return [there[begin : begin + array.size] for array, begin in zip(arrays, begins, strict=True)]
