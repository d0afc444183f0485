"""Every format, made from a weight; kernels over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tests.workers.model.native.by_hand import BLOCK, Kernel
from workers.model.config import read_config
from workers.model.native.decoder import NativeCache, NativeDecoder
from workers.model.quant.matrix import Q4, Q8_0, Quantised
from workers.model.quant.rounding import int4, int8
from workers.model.weights import SafetensorsSource, Weights


def q4(weight: Tensor) -> Quantised:
    """A group's least and largest become codes 0 and 15, as GGUF's Q4_1 does."""
    rows, columns = weight.shape
    x = torch.nn.functional.pad(weight.float(), (0, -columns % 32)).view(rows, -1, 32)
    low, high = x.amin(-1), x.amax(-1)
    d, m = ((high - low) / 15).half(), low.half()
    codes = ((x - m.float()[..., None]) / d.float()[..., None]).round().clamp(0, 15).to(torch.uint8).view(rows, -1)
    return Quantised(Q4, columns, codes[:, ::2] | codes[:, 1::2] << 4, (d, m))


def q8_0(weight: Tensor) -> Quantised:
    """As a GGUF file would have it."""
    return replace(int8(weight), format=Q8_0)


FORMATS: Mapping[str, Callable[[Tensor], Quantised]] = {"q8": int8, "q8_0": q8_0, "q4": q4, "q4k": int4}
EXACT = [
    (name, dtype)
    for name in FORMATS
    for dtype in (torch.float32, torch.bfloat16)
    if (name, dtype) != ("q8", torch.bfloat16)  # which is multiplied as integers: ``test_integers.py``
]
"""Those whose results are the dequantised weights' to the bit."""


class Rounded:
    """A rounding for ``Weights`` that notes what it rounded; ``dense``: gives what that stands for instead."""

    def __init__(self, quantise: Callable[[Tensor], Quantised], dense: bool = False) -> None:
        self.quantise, self.dense = quantise, dense
        self.names: set[str] = set()

    def __call__(self, name: str, weight: Tensor) -> Quantised:
        self.names.add(name.split(".")[-2])
        return self.quantise(weight)


class Dense(Weights):
    """Hands out what quantised matrices stand for."""

    def matrix(self, name: str, shape: tuple[int, int]) -> Tensor | Quantised:
        made = super().matrix(name, shape)
        assert isinstance(made, Quantised)
        return made.dense(self._dtype)


def kernel_of(directory: Path, dtype: torch.dtype, rounded: Rounded, threads: int = 2) -> Kernel:
    """The kernel over a directory's weights, rounded."""
    config = read_config(directory)
    kernel = Kernel.__new__(Kernel)
    kernel.cache, kernel.block = NativeCache(config, 160, BLOCK, dtype), BLOCK
    kind = Dense if rounded.dense else Weights
    with SafetensorsSource(directory) as source, torch.inference_mode():
        weights = kind(source, dtype, torch.device("cpu"), rounding=rounded)
        kernel.decoder = NativeDecoder(config, weights, 4096, kernel.cache, dtype, threads)
    return kernel
