"""Grammar masks onto logits, for all constrained rows of a step at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from workers.engine.constraint import Constraint
from workers.engine.sequence import Sequence


def allows(constraint: Constraint, token: int) -> bool:
    """Whether a grammar allows ``token`` next; False where it failed. Waits for a mask that is being made."""
    mask = constraint.allowed()
    return mask is not None and token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def forbid(logits: Tensor, samplers: list[Sequence]) -> list[int]:
    """Set what grammars forbid to -inf in ``logits`` [samplers, vocab]; rows without a grammar are not touched.

    Waits for masks that are being made. Returns the rows that can have no token: their grammar failed, or nothing that
    it allows has a finite logit.
    """
    rows: list[int] = []
    bits: list[memoryview] = []
    stuck: list[int] = []
    for row, one in enumerate(samplers):
        if one.constraint is not None:
            mask = one.constraint.allowed()
            if mask is None:
                stuck.append(row)
            else:
                rows.append(row)
                bits.append(mask)
    if not rows:
        return stuck
    vocab = logits.shape[1]
    packed = np.stack([np.frombuffer(mask, dtype=np.uint8) for mask in bits])
    allowed = np.unpackbits(packed, axis=1, count=vocab, bitorder="little")  # ids beyond the mask's end: 0
    forbidden = torch.from_numpy(allowed).to(logits.device) == 0
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -math.inf)
        best = logits.amax(dim=-1)
    else:
        place = torch.tensor(rows, device=logits.device)
        part = logits[place].masked_fill_(forbidden, -math.inf)
        logits[place] = part
        best = part.amax(dim=-1)
    return stuck + [row for row, value in zip(rows, best.tolist(), strict=True) if value == -math.inf]
