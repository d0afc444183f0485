"""Ids that nobody can guess and no two things share."""

from __future__ import annotations

import secrets

_DIGITS = 24
_AT_ONCE = 256
_drawn: list[str] = []


def new_id() -> str:
    """24 hex digits. Randomness is asked for many at once: each time costs a system call."""
    try:
        return _drawn.pop()
    except IndexError:
        digits = secrets.token_hex(_AT_ONCE * _DIGITS // 2)
        _drawn.extend(digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS))
        return _drawn.pop()
