"""Ids: each once, and of one form."""

from __future__ import annotations

import re

from gateway.ids import new_id


def test_no_id_comes_twice_and_all_have_24_hex_digits() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch("[0-9a-f]{24}", one) for one in ids)
