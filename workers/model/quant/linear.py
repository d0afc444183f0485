"""A linear over a quantised matrix, in torch: the weights are unpacked when they are needed and dropped again.

That saves memory, not time: torch has no product of these formats that gives the numbers of all other paths. The
kernel on a CPU unpacks in registers instead (``native/quantised.h``).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from workers.model.quant.matrix import Quantised, Stacked


class QuantisedLinear(nn.Linear):
    """y = x W^T + b with W = ``matrix.dense()``; an ``nn.Linear``, so that hooks see it as one."""

    def __init__(self, matrix: Quantised | Stacked, bias: Tensor | None) -> None:
        """``bias`` [outputs]."""
        rows, columns = matrix.shape
        super().__init__(columns, rows, bias=False, device="meta")
        del self.weight
        self.matrix = matrix
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, inputs] → [rows, outputs]."""
        return linear(x, self.matrix.dense(x.dtype), self.bias)
