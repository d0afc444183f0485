"""Scalars are taken as written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, ValidationError

from policies.strict import StrictScalars


class Sample(StrictScalars):
    number: float = 1.0
    count: int | None = None
    flag: bool = False
    either: int | Literal["auto"] = 1
    parsed: Annotated[int, BeforeValidator(int), Field(gt=0)] = 1
    maybe: bool | None = None
    text: str = ""
    optional: float | None = None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("number", True, "write a number, not true"),
        ("number", "4", "write a number, not text"),
        ("count", False, "write a number, not false"),
        ("count", "12", "write a number, not text"),
        ("flag", "yes", "write true or false, not text"),
        ("maybe", "off", "write true or false, not text"),
        ("number", 1e-320, "must be 0, or between 1e-09 and 1e\\+15 in size; got 1e-320"),
        ("number", -1e308, "got -1e\\+308"),
        ("number", 10**400, "got 1000"),
        ("optional", 5e-324, "got 5e-324"),
    ],
)
def test_a_scalar_of_another_kind_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        Sample.model_validate({field: value})
    assert caught.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", 4),
        ("number", 0),
        ("number", -1e-9),
        ("number", 1e15),
        ("optional", None),
        ("count", None),
        ("flag", True),
        ("either", "auto"),
        ("parsed", "7"),
        ("maybe", None),
        ("text", "4"),
    ],
)
def test_what_is_meant_passes(field: str, value: Any) -> None:
    Sample.model_validate({field: value})
