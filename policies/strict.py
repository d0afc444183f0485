"""Configuration says what it means: ``true`` is no number, ``"4"`` is neither a number nor a boolean, 1e-320 no weight.

Pydantic's strict mode would also refuse a list for a tuple, which is all that YAML has; so only the coercions that hide
a mistake are refused here, for every model of the configuration alike.
"""

from __future__ import annotations

import math
import re
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ValidationInfo, field_validator

_NUMBERS = frozenset({int, float})
LEAST, MOST = 1e-9, 1e15
"""Sizes that arithmetic bears: a cost over 1e-320, or one of 1e308 times a few tokens, is infinite."""
WEIGHTS = (1e-6, 1e6)
"""Of tenants, pools and members: the smallest and the largest weight."""
_IN_URL = re.compile(r"//[^/@\s]+@")


def quoted(value: object) -> str:
    """A value of a configuration as a message may repeat it: short, and without the credential of a URL."""
    text = _IN_URL.sub("//…@", "null" if value is None else repr(value))
    return text if len(text) <= 80 else text[:77] + "…"


class StrictScalars(BaseModel):
    """Mixin: scalars are taken as they are written."""

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name is None or not isinstance(value, bool | str | int | float):
            return value
        allowed = _scalars(cls, info.field_name)
        if isinstance(value, bool | str):
            if allowed and type(value) not in allowed:
                wanted = "a number" if allowed & _NUMBERS else "true or false"
                written = str(value).lower() if isinstance(value, bool) else "text"
                raise ValueError(f"write {wanted}, not {written}")
        elif float in allowed and value and math.inf > abs(value) and not LEAST <= abs(value) <= MOST:
            raise ValueError(f"must be 0, or between {LEAST:g} and {MOST:g} in size; got {quoted(value)}")
        return value


@cache
def _scalars(model: type[BaseModel], name: str) -> frozenset[type]:
    """The scalar types a field takes, empty when it also takes text or parses it itself."""
    field = model.model_fields[name]
    if any(isinstance(part, BeforeValidator) for part in field.metadata):
        return frozenset()
    found = frozenset(_flat(field.annotation))
    return found if found <= _NUMBERS | {bool, type(None)} and found & (_NUMBERS | {bool}) else frozenset()


def _flat(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return [inner for part in get_args(annotation) for inner in _flat(part)]
    if origin is Annotated:
        first, *rest = get_args(annotation)
        return [str] if any(isinstance(part, BeforeValidator) for part in rest) else _flat(first)
    return [annotation]
