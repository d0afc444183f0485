"""The random numbers behind sampling."""

from __future__ import annotations

import numpy as np
import pytest

from workers.model.philox import philox, uniforms

_ONES, _PI = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((_ONES,) * 4, (_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (_PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Vectors published with Random123 (kat_vectors, philox4x32 10)."""
    words = philox(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert tuple(int(word) for word in words[0]) == expected


def test_a_draw_depends_on_its_own_seed_and_position_only() -> None:
    seeds, positions = [1, 2**40 + 7, -3, 2**70], [5, 2**33, 0, 9]
    together = uniforms(seeds, positions)
    alone = [uniforms([seed], [position])[0] for seed, position in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_fill_the_unit_interval_evenly() -> None:
    numbers = uniforms(range(300), [3] * 300).tolist() + uniforms([3] * 20000, range(20000)).tolist()
    assert min(numbers) >= 0.0
    assert max(numbers) < 1.0
    counts, _ = np.histogram(numbers[300:], bins=50, range=(0, 1))
    chi2 = float(((counts - 400) ** 2 / 400).sum())
    assert chi2 < 85.4  # p = 0.001 at 49 degrees of freedom
    assert abs(np.corrcoef(numbers[300:-1], numbers[301:])[0, 1]) < 0.03
