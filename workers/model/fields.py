"""Reads what a model's files say of it; whatever is not of the kind that it should be is an error that names it.

``where`` is the file, for errors. A field that is null counts as one that is not there. All raise ModelStoreError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from workers.model_store import ModelStoreError

Fields = Mapping[str, Any]
MOST = 2**31
"""No size or id reaches it: kernels count in 32 bits."""


def read_object(path: Path) -> Fields:
    """A JSON file's object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelStoreError(f"{path.parent}: cannot read the model's config: {path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelStoreError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def is_size(value: object) -> bool:
    """Whether it is a positive whole number that something can have as its size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST


def positive(fields: Fields, name: str, where: str, default: int | None = None) -> int:
    """A size."""
    value = fields.get(name)
    value = default if value is None else value
    if not is_size(value):
        raise ModelStoreError(f"{where}: {name}={value!r} must be a positive whole number")
    assert isinstance(value, int)
    return value


def natural(fields: Fields, name: str, where: str, default: int) -> int:
    """A size, or 0."""
    return 0 if fields.get(name) == 0 else positive(fields, name, where, default)


def number(fields: Fields, name: str, where: str, default: float = 0.0) -> float:
    """A positive number, or ``default`` where none is named."""
    value = fields.get(name)
    if value is None:
        return default
    try:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and isfinite(value)
    except OverflowError:
        fine = False
    if not fine:
        raise ModelStoreError(f"{where}: {name}={value!r} must be a positive number")
    return float(value)


def flag(fields: Fields, name: str, where: str, default: bool = False) -> bool:
    """True or false."""
    value = fields.get(name)
    if value is None:
        return default
    if value is not True and value is not False:
        raise ModelStoreError(f"{where}: {name}={value!r} must be true or false")
    return bool(value)


def part(fields: Fields, name: str, where: str) -> Fields:
    """An object, empty where there is none."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelStoreError(f"{where}: {name}={value!r} must be an object")
    return value


def ids(fields: Fields, name: str, where: str) -> frozenset[int]:
    """One id, a list of ids or nothing."""
    value = fields.get(name)
    found = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < MOST for one in found):
        raise ModelStoreError(f"{where}: {name}={value!r} must be an id or a list of ids")
    return frozenset(found)


def names(fields: Fields, name: str, where: str) -> list[str]:
    """A list of names, empty where there is none."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ModelStoreError(f"{where}: {name}={value!r} must be a list of names")
    return value
