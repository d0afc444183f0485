"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864 §3.4) in the half-split form of Llama checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2]: theta^(-2i/head_dim), scaled as ``rope.kind`` says."""
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim)
    return base


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are slowed by ``factor``, short ones kept, a linear ramp between (Llama 3.1, reference code)."""
    wave = 2 * math.pi / base
    turns = rope.original_context / wave
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clamp(0.0, 1.0)
    return (1 - ramp) * base / rope.factor + ramp * base


def _yarn(base: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often in the original context are kept, those that turn seldom are slowed by ``factor``, a linear
    ramp over the pairs between (Peng et al. 2023, arXiv:2309.00071 §3.2)."""
    often, seldom = rope.turns

    def pair(turns: float) -> float:
        """Which pair turns so often in the original context."""
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(often), pair(seldom)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    slowed = ((torch.arange(len(base), dtype=torch.float32) - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return base * (1 - slowed) + base / rope.factor * slowed


def table(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """fp32 cosines and sines [positions, head_dim / 2], times what queries and keys are multiplied by."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)[None]
    return angles.cos() * rope.attention, angles.sin() * rope.attention


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [rows, heads, head_dim] by cos and sin [rows, 1, head_dim / 2] (same dtype as x)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
