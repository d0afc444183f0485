"""Adapters in the kernel's layouts (``lora.h``). An adapter's memory lives as long as its object."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.config import ModelConfig
from workers.model.lora import KINDS, Lora, module_shape
from workers.model.native import pack
from workers.model.native.abi import Lora as Entry

GROUP = pack.LANES


def low_width(max_rank: int) -> int:
    """Most numbers that a row is shrunk to, over the parts of one linear."""
    return _padded(3 * (max_rank + max_rank % 2), GROUP)


class NativeAdapter:
    """One adapter, packed for one model and type."""

    def __init__(self, lora: Lora, model: ModelConfig, dtype: torch.dtype) -> None:
        """Copies what it takes of ``lora``."""
        self.bytes = 0
        self._kept: list[Tensor] = []
        self._dtype = dtype
        self.entries = (Entry * (model.layers * len(KINDS)))()
        for layer in range(model.layers):
            for kind, (name, modules) in enumerate(KINDS.items()):
                pairs = [lora.pairs.get((layer, module)) for module in modules]
                if any(pair is not None for pair in pairs):
                    halves = [(pair.a, pair.b) if pair is not None else None for pair in pairs]
                    shapes = [module_shape(model, module) for module in modules]
                    self.entries[layer * len(KINDS) + kind] = self._entry(halves, shapes, name == "gate_up")

    @property
    def address(self) -> int:
        """Of its first entry."""
        return ctypes.addressof(self.entries)

    def _entry(
        self, halves: Sequence[tuple[Tensor, Tensor] | None], shapes: Sequence[tuple[int, int]], gated: bool
    ) -> Entry:
        """One linear. A part without an update has zeros; all parts have the rank of the highest."""
        rank = max(len(pair[0]) for pair in halves if pair is not None)
        rank += rank % 2
        inner = shapes[0][1]
        stacked = torch.zeros(_padded(rank * len(halves), GROUP), inner)
        columns = []
        for part, (pair, (out, _)) in enumerate(zip(halves, shapes, strict=True)):
            b = torch.zeros(out, rank)
            if pair is not None:
                stacked[part * rank : part * rank + len(pair[0])] = pair[0]
                b[:, : pair[1].shape[1]] = pair[1]
            columns.append(b)
        up = pack.gated(*columns) if gated else torch.cat(columns)
        up = torch.cat([up, torch.zeros(-len(up) % pack.PANEL, rank)])
        a, b = self._grouped(stacked), self._grouped(up)
        return Entry(a=a.data_ptr(), b=b.data_ptr(), rank=rank, total=len(stacked))

    def _grouped(self, weight: Tensor) -> Tensor:
        """[n, k] → [n/16][k/K][16][K], in the adapter's type."""
        n, k = weight.shape
        pair = 2 if self._dtype == torch.bfloat16 else 1
        made = pack.buffer(n * k, self._dtype)
        shape = (n // GROUP, k // pair, GROUP, pair)
        made.view(shape).copy_(weight.view(n // GROUP, GROUP, k // pair, pair).permute(0, 2, 1, 3))
        self._kept.append(made)
        self.bytes += made.nbytes
        return made


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
