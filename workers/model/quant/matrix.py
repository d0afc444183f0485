"""A weight matrix in 8 or 4 bits, in groups of 32 inputs of one output.

    q8    w = d q            d half, q in [-127, 127]                                   8.5 bits per weight
    q8_0  w = d q            the same, as a GGUF file has it: q may be -128             8.5 bits
    q4    w = d q + m        d, m half, q in [0, 15]                                     5 bits
    q4k   w = D a q - M b    D, M half per 8 groups, a and b bytes per group             4.63 bits

Rules
- A weight is the formula in fp32, rounded once to bfloat16. Every product in it is exact, so torch, the kernel on any
  machine and the dequantised matrix compute with the very same numbers, whatever type they compute in. But for q8
  where the kernel computes in bfloat16: there codes are multiplied as integers, and weights not rounded at all
  (``native/fixed.h``).
- Rows (outputs) are independent: they may be picked, reordered and joined. Inputs may not.
- Inputs that do not fill the last group are followed by codes 0 that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale."""
SUPER = 8
"""Groups of q4k that share D and M."""
ROWS, CUDA_ROWS = 1 << 18, 1 << 24
"""Weights that are unpacked to fp32 at a time: what a core's cache holds, and what keeps a GPU busy."""


@dataclass(frozen=True, slots=True)
class Format:
    """How codes and scales become weights. ``parts`` names the tensors beside the codes, [rows, groups or supers]."""

    name: str
    bits: int
    """Of a code; those of 4 bits lie two in a byte, the first in the low half."""
    parts: tuple[str, ...]
    scales: Callable[..., tuple[Tensor, Tensor | None]]
    """fp32 factor and offset [rows, groups] of the parts."""


def _one(d: Tensor) -> tuple[Tensor, None]:
    return d.float(), None


def _two(d: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    return d.float(), m.float()


def _nested(d: Tensor, m: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    groups = a.shape[1]
    factor, offset = (part.float().repeat_interleave(SUPER, 1)[:, :groups] for part in (d, m))
    return factor * a.float(), -(offset * b.float())


Q8 = Format("q8", 8, ("d",), _one)
Q8_0 = Format("q8_0", 8, ("d",), _one)
Q4 = Format("q4", 4, ("d", "m"), _two)
Q4K = Format("q4k", 4, ("d", "m", "a", "b"), _nested)


@dataclass(frozen=True, slots=True)
class Quantised:
    """One matrix [rows, columns]."""

    format: Format
    columns: int
    codes: Tensor
    """q8: int8 [rows, groups x 32]; others: uint8 [rows, groups x 16]."""
    parts: tuple[Tensor, ...]
    """In the order of ``format.parts``."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.codes), self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Codes and parts."""
        return (self.codes, *self.parts)

    def rows(self, pick: Callable[[Tensor], Tensor]) -> Quantised:
        """The matrix whose rows are ``pick`` of these; it is applied to each tensor [rows, …] alike."""
        codes, *parts = (pick(part) for part in self.tensors())
        return Quantised(self.format, self.columns, codes, tuple(parts))

    def unpacked(self) -> Tensor:
        """Codes one by one, [rows, groups x 32]; int8 or uint8."""
        if self.format.bits == 8:
            return self.codes
        return torch.stack([self.codes & 15, self.codes >> 4], -1).view(len(self.codes), -1)

    def dense(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weights [rows, columns]: bfloat16 numbers, in ``dtype``."""
        made = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        step = max(1, (CUDA_ROWS if made.is_cuda else ROWS) // max(1, self.columns))
        for start in range(0, len(made), step):
            made[start : start + step] = self.rows(lambda part, at=start: part[at : at + step])._dense()  # type: ignore[misc]
        return made

    def _dense(self) -> Tensor:
        factor, offset = self.format.scales(*self.parts)
        values = self.unpacked().view(len(self.codes), -1, GROUP).float().mul_(factor[..., None])
        if offset is not None:
            values += offset[..., None]
        return values.to(torch.bfloat16).view(len(self.codes), -1)[:, : self.columns]


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices of the same inputs whose formats differ, as one: the rows of the first, then those of the next."""

    layers: tuple[Quantised, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(len(one.codes) for one in self.layers), self.layers[0].columns

    def tensors(self) -> tuple[Tensor, ...]:
        """Codes and parts of all."""
        return tuple(tensor for one in self.layers for tensor in one.tensors())

    def dense(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """As ``Quantised.dense``."""
        return torch.cat([one.dense(dtype) for one in self.layers])


Matrix = Tensor | Quantised | Stacked
"""What a linear multiplies with."""


def joined(parts: Sequence[Tensor | Quantised]) -> Matrix:
    """Matrices of the same inputs as one, in order; dense where one of them is."""
    if len(parts) == 1:
        return parts[0]
    kept = [part for part in parts if isinstance(part, Quantised)]
    if len(kept) < len(parts):
        dtype = next(part.dtype for part in parts if isinstance(part, Tensor))
        return torch.cat([part.dense(dtype) if isinstance(part, Quantised) else part for part in parts])
    runs = [list(run) for _, run in groupby(kept, key=lambda part: part.format.name)]
    made = tuple(cat(run) for run in runs)
    return made[0] if len(made) == 1 else Stacked(made)


def cat(parts: Sequence[Quantised]) -> Quantised:
    """Matrices of the same inputs and format as one, in order."""
    codes, *scales = (torch.cat(column) for column in zip(*(part.tensors() for part in parts), strict=True))
    return Quantised(parts[0].format, parts[0].columns, codes, tuple(scales))
