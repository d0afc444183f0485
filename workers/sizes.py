"""Sizes in bytes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


MOST = 2**63 - 1
"""What a system call takes."""


def parse_bytes(value: Any) -> Any:
    """``"1GiB"`` → 1073741824. Plain integers are bytes. Raises ValueError naming the accepted forms."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a size; write a number of bytes or e.g. 512MiB, 1GiB")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].upper() not in _UNITS:
            raise ValueError(f"{value!r} is not a size; write a number of bytes or e.g. 512MiB, 1GiB")
        return int(Decimal(match[1]) * _UNITS[match[2].upper()])
    return value


def bytes_or_auto(value: Any) -> Any:
    """As ``parse_bytes``, or the word auto. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a size; write a number of bytes, e.g. 512MiB, or auto")
    return value if value == "auto" else parse_bytes(value)


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, le=MOST)]
