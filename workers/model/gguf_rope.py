"""How a GGUF file scales its rotations → ``rope_scaling`` as ``config.json`` has it. No torch.

A Llama 3 file names no parameters. It has a tensor: what the frequency of each pair is divided by. What llama.cpp's
converter writes there follows from Llama 3.1's own constants and one number, the largest; so that number is taken, and
a tensor that does not follow from it is refused. YaRN's numbers are metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "original_context_length": ""}
"""Metadata behind ``rope.scaling.`` that is understood, and the field of ``config.json``."""


def llama3(factors: NDArray[Any], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The parameters that these factors follow from; None where there are none."""
    if factors.shape != (head_dim // 2,) or not np.isfinite(factors).all() or factors.min() <= 0:
        return None
    factor = float(f"{factors.max():.6g}")  # stored as float32
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    wave = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept = ((LLAMA3["original_max_position_embeddings"] / wave - low) / (high - low)).clip(0.0, 1.0)
    if not np.allclose(factors, 1 / ((1 - kept) / factor + kept), rtol=1e-3):
        return None
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def yarn(told: Mapping[str, Any]) -> dict[str, Any] | str:
    """YaRN's parameters. ``told``: the metadata behind ``rope.scaling.``. A text names what is not understood."""
    known = {"type", "factor", "finetuned", *YARN}
    if strange := sorted(set(told) - known):
        return strange[0]
    if missing := sorted({"factor", "original_context_length"} - set(told)):
        return missing[0]
    named = {theirs: told[ours] for ours, theirs in YARN.items() if theirs and ours in told}
    original = told["original_context_length"]
    return {"rope_type": "yarn", "factor": told["factor"], "original_max_position_embeddings": original, **named}
