"""Adapters in torch: which rows of a step they concern, and what they add to a linear's output.

One pair of matrix products per adapter in the step, layer and module, over that adapter's rows alone: rows without an
adapter cost nothing, and a step without any is what it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from workers.engine.plan import Chunk, SequenceFault
from workers.model.lora import KINDS, Lora

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Part:
    first: int
    """First column of the fused output."""
    a: Tensor
    b: Tensor


class TorchAdapter:
    """One adapter on the device, by layer and fused linear."""

    def __init__(
        self, lora: Lora, sizes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """``sizes``: columns of each part of a fused linear (``lora.KINDS``)."""
        self._parts: dict[tuple[int, str], list[_Part]] = {}
        self.bytes = 0
        layers = {layer for layer, _ in lora.pairs}
        for layer in layers:
            for kind, modules in KINDS.items():
                first = 0
                for module, size in zip(modules, sizes[kind], strict=True):
                    pair = lora.pairs.get((layer, module))
                    if pair is not None:
                        part = _Part(first, pair.a.to(device, dtype), pair.b.to(device, dtype))
                        self._parts.setdefault((layer, kind), []).append(part)
                        self.bytes += part.a.nbytes + part.b.nbytes
                    first += size

    def add(self, layer: int, kind: str, rows: Tensor, x: Tensor, y: Tensor) -> None:
        """Add the update of ``rows`` [int64] of x [rows, in] to the same rows of y [rows, out]."""
        parts = self._parts.get((layer, kind))
        if not parts:
            return
        own = x[rows]
        for part in parts:
            columns = y[:, part.first : part.first + len(part.b)]
            columns.index_add_(0, rows, (own @ part.a.T) @ part.b.T)


class Deltas:
    """The adapters of one step."""

    def __init__(self, groups: Sequence[tuple[TorchAdapter, Tensor]]) -> None:
        """``groups``: each adapter with its rows."""
        self._groups = groups

    def add(self, layer: int, kind: str, x: Tensor, y: Tensor) -> None:
        """Add every adapter's update to its rows of y, in place."""
        for adapter, rows in self._groups:
            adapter.add(layer, kind, rows, x, y)


def used(chunks: Sequence[Chunk], held: Mapping[str, T]) -> tuple[list[T], list[int]]:
    """The adapters that ``chunks`` name, each once, and for every chunk which of them it is (-1: none).

    Raises SequenceFault for those that name one that is not held: the base model's answer would be a wrong one.
    """
    found: dict[str, int] = {}
    which = []
    for chunk in chunks:
        digest = chunk.sequence.adapter
        which.append(-1 if digest is None else found.setdefault(digest, len(found)))
    missing = [digest for digest in found if digest not in held]
    if missing:
        lost = tuple(chunk.sequence for chunk in chunks if chunk.sequence.adapter in missing)
        raise SequenceFault(f"adapter {missing[0]} is not loaded", lost)
    return [held[digest] for digest in found], which


def deltas_of(
    chunks: Sequence[Chunk], starts: Sequence[int], held: Mapping[str, TorchAdapter], device: torch.device
) -> Deltas | None:
    """The adapters of a step whose chunks begin at rows ``starts``; None where there are none."""
    adapters, which = used(chunks, held)
    if not adapters:
        return None
    rows: list[list[int]] = [[] for _ in adapters]
    for chunk, start, index in zip(chunks, starts, which, strict=True):
        if index >= 0:
            rows[index].extend(range(start, start + chunk.count))
    return Deltas(
        [
            (adapter, torch.tensor(own, dtype=torch.int64, device=device))
            for adapter, own in zip(adapters, rows, strict=True)
        ]
    )
