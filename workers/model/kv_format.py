"""Keys and values in eight bits: a byte for each number, one scale for each token and key head.

The scale is the head's largest magnitude ÷ the largest number of the format, rounded up to bfloat16 so that nothing
overflows; both lie in the token's row, so whatever moves, copies or zeroes a block takes them along. Per token, not per
block (KIVI's finding that keys want channels' scales, Liu et al. 2024, arXiv:2402.02750, is about two to four bits): a
token is then quantised once, when it is written, and its bits depend on nothing but itself.

Errors, s being the scale, at most (1 + 2^-7) · max|x| / largest:
- int8: |x̂ - x| <= s / 2.
- fp8 (e4m3): |x̂ - x| <= max(|x| / 16, s / 1024).
- A score q·k / √d moves by at most Σ |q_i| · e_i / √d where e_i bounds the error of the key's i-th number; when all
  scores of a row move by at most ε, its output moves by at most (e^2ε - 1) · max|v̂| + the values' error.
- A head that holds no finite number comes back as NaN, so that its sequence ends as it would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.config import KV_SCALE_BYTES

SCALE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One format: its torch type and the largest magnitude it holds."""

    name: str
    element: torch.dtype
    largest: float

    def pack(self, x: Tensor) -> Tensor:
        """x [tokens, heads, dim] of any float type → uint8 [tokens, heads * dim + 2 * heads]: numbers, then scales."""
        wide = x.float()
        scale = self._scales(wide)
        held = wide / torch.where(scale > 0, scale, 1.0)[..., None]
        if not self.element.is_floating_point:
            held = held.round()
        parts = (held.to(self.element).flatten(1), scale.to(SCALE))
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def unpack(self, rows: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """What ``pack`` made → [tokens, heads, dim] of ``dtype``."""
        numbers = rows.shape[1] - KV_SCALE_BYTES * heads
        held = rows[:, :numbers].view(self.element).view(len(rows), heads, numbers // heads)
        scale = rows[:, numbers:].contiguous().view(SCALE)
        return (held.float() * scale.float()[..., None]).to(dtype)

    def _scales(self, x: Tensor) -> Tensor:
        """fp32 [tokens, heads], bfloat16's numbers only: rounded up, NaN for a head that is not finite."""
        peak = x.abs().amax(-1)
        up = ((peak / self.largest).view(torch.int32) + 0xFFFF >> 16 << 16).view(torch.float32)
        return torch.where(peak.isfinite(), up, torch.nan)


FORMATS: Mapping[str, KvFormat] = {
    one.name: one for one in (KvFormat("int8", torch.int8, 127.0), KvFormat("fp8", torch.float8_e4m3fn, 448.0))
}
"""By ``engine.kv_dtype``; ``auto`` is none of them."""
