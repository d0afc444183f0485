"""What a decoder sees of the devices that it runs on: its place among them.

Rules
- A lane's activations are whole and equal on every lane of a stage, to the bit, but between a linear that is cut by
  columns and ``add``.
- Logits come together at rank 0, which samples: it alone, so that ranks never differ.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding


class Place(Protocol):
    """``first``: embeds tokens. ``last``: makes logits. A single device is both."""

    first: bool
    last: bool

    def add(self, x: Tensor) -> Tensor:
        """The sum of every lane's x, of the same shape; may be x itself, changed."""
        ...

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows [rows, hidden] of ``table`` [this lane's part of the vocabulary, hidden] for int64 tokens [rows]."""
        ...

    def receive(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The activations of the stage before: of ``shape``, in the type and on the device of ``like``."""
        ...

    def send(self, x: Tensor) -> None:
        """This stage's activations go to the next."""
        ...

    def gather(self, logits: Tensor | None, rows: int) -> Tensor:
        """fp32 logits [rows, vocab] at rank 0, from the last stage's [rows, its part of the vocabulary]; elsewhere and
        from other stages (``logits`` None) whatever was given, or nothing."""
        ...


class Alone:
    """The only device."""

    first = last = True

    def add(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """The rows."""
        return embedding(tokens, table)

    def receive(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """There is no stage before."""
        raise AssertionError("the only device embeds tokens itself")

    def send(self, x: Tensor) -> None:
        """There is no stage behind."""
        raise AssertionError("the only device makes logits itself")

    def gather(self, logits: Tensor | None, rows: int) -> Tensor:
        """They are here."""
        assert logits is not None
        return logits


def nothing(like: Tensor) -> Tensor:
    """No logits at all."""
    return torch.empty(0, 0, dtype=torch.float32, device=like.device)


ALONE = Alone()
