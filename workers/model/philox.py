"""Philox 4×32-10, a counter-based random generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A draw is a function of (seed, position) alone, with no state between draws: what else is in the batch, how often the
sequence was preempted and which worker runs it cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: Words, key: Words) -> Words:
    """Ten rounds over counters [n, 4] with keys [n, 2] (32-bit words held in uint64); returns [n, 4] random words."""
    c0, c1, c2, c3 = counter.T.copy()
    k0, k1 = key.T.copy()
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _MASK, (first >> _HALF) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(seeds: Iterable[int], positions: Iterable[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for every (seed, position); seeds are taken modulo 2**64."""
    key = _split(seeds)
    counter = np.concatenate([_split(positions), np.zeros_like(key)], axis=1)
    words = philox(counter, key)
    bits = (words[:, 0] << np.uint64(21)) ^ (words[:, 1] >> np.uint64(11))
    return np.asarray(bits, dtype=np.float64) * 2.0**-53


def _split(values: Iterable[int]) -> Words:
    """Whole numbers → [n, 2] low and high 32-bit words."""
    words = np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], dtype=np.uint64)
    return np.stack([words & _MASK, words >> _HALF], axis=1)
