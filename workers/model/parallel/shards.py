"""A source of weights that holds one rank's part of another, so that a decoder of a part loads like any other."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.parallel.split import Cut, Split
from workers.model.weights import Source


class ShardSource:
    """``weights.Source`` of the part that ``split`` describes. Pieces are views where the stored tensor is one."""

    def __init__(self, source: Source, split: Split) -> None:
        self._source, self._split = source, split

    def names(self) -> set[str]:
        """All tensors of the part, by the names that they have in it."""
        return {name for stored in self._source.names() if (name := self._split.named(stored)) is not None}

    def read(self, name: str) -> Tensor:
        """One tensor of the part on the CPU, in its stored type."""
        stored = self._split.stored(name)
        tensor = self._source.read(name if stored is None else stored)
        if self._split.zeroed(name):
            return torch.zeros_like(tensor)
        cut = self._split.cut(name)
        return tensor if cut is None else piece(tensor, cut)


def piece(tensor: Tensor, cut: Cut) -> Tensor:
    """The piece of a tensor; a last one that is short is filled up with zeros."""
    size = -(-tensor.shape[cut.axis] // cut.parts)
    begin = min(cut.index * size, tensor.shape[cut.axis])
    end = min(begin + size, tensor.shape[cut.axis])
    found = tensor.narrow(cut.axis, begin, end - begin)
    if end - begin == size:
        return found
    shape = [*found.shape]
    shape[cut.axis] = size - (end - begin)
    return torch.cat((found, found.new_zeros(shape)), dim=cut.axis)
