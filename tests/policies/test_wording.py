"""Mistakes of a configuration in words: what to write, and which keys there are."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pydantic import Field, ValidationError

from policies.spi import PolicyConfig
from policies.wording import complaint


class Inner(PolicyConfig):
    """A section."""

    size: int = Field(1, ge=1)
    name: str = "a"


class Outer(PolicyConfig):
    """A file."""

    share: float = Field(1.0, allow_inf_nan=False)
    on: bool = True
    entries: tuple[Inner, ...] = ()
    named: dict[str, Inner] = Field(default_factory=dict)
    sum: Decimal = Decimal(0)
    needed: tuple[int, ...] = Field((1,), min_length=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"share": []}, "write a number"),
        ({"share": float("inf")}, "write a finite number"),
        ({"on": 5}, "write true or false"),
        ({"on": []}, "write true or false"),
        ({"entries": 3}, "write a list, e.g. [a, b]"),
        ({"entries": [3]}, "write a mapping, e.g. {key: value}"),
        ({"named": []}, "write a mapping, e.g. {key: value}"),
        ({"named": {"x": {"name": 3}}}, "write text"),
        ({"named": {"x": {"size": 1.5}}}, "write a whole number"),
        ({"named": {"x": {"size": None}}}, "write a whole number"),
        ({"named": {"x": {"size": 0}}}, "Input should be greater than or equal to 1"),
        ({"named": {"x": {"siez": 2}}}, "there is no such key (known: name, size)"),
        ({"entries": [{}, {"nmae": 2}]}, "there is no such key (known: name, size)"),
        ({"oops": 1}, "there is no such key (known: entries, named, needed, on, share, sum)"),
        ({"sum": "x"}, "write a number"),
        ({"needed": []}, "needs at least one entry"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_says_what_to_write(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(given)
    (detail,) = caught.value.errors(include_url=False)
    assert complaint(detail, Outer) == words
