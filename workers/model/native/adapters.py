"""Adapters in the kernel's layouts (``lora.h``). An adapter's memory lives as long as its object."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.config import ModelConfig
from workers.model.lora import KINDS, Lora, Pair, module_shape
from workers.model.native import pack
from workers.model.native.abi import Lora as Entry

GROUP = pack.LANES
LINE = 32
"""Numbers after which the next table begins: whole cache lines."""


def low_width(max_rank: int) -> int:
    """Most numbers that a row is shrunk to, over the parts of one linear."""
    return _padded(3 * (max_rank + max_rank % 2), GROUP)


class NativeAdapter:
    """One adapter, packed for one model and type, in one piece of memory."""

    def __init__(self, lora: Lora, model: ModelConfig, dtype: torch.dtype) -> None:
        """Copies what it takes of ``lora``. Raises OSError or ValueError where the memory is not there."""
        self._dtype = dtype
        packed: dict[int, tuple[int, Tensor, Tensor]] = {}
        for layer in range(model.layers):
            for kind, (name, modules) in enumerate(KINDS.items()):
                pairs = [lora.pairs.get((layer, module)) for module in modules]
                if any(pairs):
                    shapes = [module_shape(model, module) for module in modules]
                    packed[layer * len(KINDS) + kind] = self._packed(pairs, shapes, name == "gate_up")
        self._memory = pack.buffer(
            sum(_padded(part.numel(), LINE) for _, *two in packed.values() for part in two), dtype
        )
        self._used = 0
        self.bytes = self._memory.nbytes
        self.entries = (Entry * (model.layers * len(KINDS)))()
        for index, (rank, a, b) in packed.items():
            total = a.shape[0] * GROUP
            self.entries[index] = Entry(a=self._placed(a), b=self._placed(b), rank=rank, total=total)

    @property
    def address(self) -> int:
        """Of its first entry."""
        return ctypes.addressof(self.entries)

    def _packed(
        self, pairs: Sequence[Pair | None], shapes: Sequence[tuple[int, int]], gated: bool
    ) -> tuple[int, Tensor, Tensor]:
        """One linear: rank, A, B. A part without an update has zeros; all parts have the rank of the highest."""
        rank = max(len(pair.a) for pair in pairs if pair is not None)
        rank += rank % 2
        stacked = torch.zeros(_padded(rank * len(pairs), GROUP), shapes[0][1])
        columns = [torch.zeros(out, rank) for out, _ in shapes]
        for part, pair in enumerate(pairs):
            if pair is not None:
                stacked[part * rank : part * rank + len(pair.a)] = pair.a
                columns[part][:, : pair.b.shape[1]] = pair.b
        up = torch.cat(columns)
        if gated:  # 16 columns of gate, then their 16 of up, as the epilogue reads them
            up = torch.stack([part.view(-1, GROUP, rank) for part in columns], dim=1).view(-1, rank)
        up = torch.cat([up, torch.zeros(-len(up) % pack.PANEL, rank)])
        return rank, self._grouped(stacked), self._grouped(up)

    def _grouped(self, weight: Tensor) -> Tensor:
        """[n, k] → [n/16][k/K][16][K], in the adapter's type."""
        n, k = weight.shape
        pair = 2 if self._dtype == torch.bfloat16 else 1
        return weight.to(self._dtype).view(n // GROUP, GROUP, k // pair, pair).permute(0, 2, 1, 3)

    def _placed(self, part: Tensor) -> int:
        """Copies it to the next line of the memory; its address."""
        place = self._memory[self._used : self._used + part.numel()]
        place.view(part.shape).copy_(part)
        self._used += _padded(part.numel(), LINE)
        return place.data_ptr()


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
