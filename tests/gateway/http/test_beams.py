"""Beam search's fields: what is read, and what cannot stand beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.http.schemas import parse_chat, parse_completion
from workers.protocol import Beams

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "m", "prompt": "hello"}


def beams(**fields: Any) -> tuple[int, Beams | None]:
    found = [
        parse_chat(json.dumps(CHAT | fields).encode()),
        parse_completion(json.dumps(COMPLETION | fields).encode()),
    ]
    assert found[0].beams == found[1].beams
    assert found[0].lines == found[1].lines
    return found[0].lines, found[0].beams


def refused(**fields: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        parse_completion(json.dumps(COMPLETION | fields).encode())
    assert caught.value.status == 400
    return caught.value.param


@pytest.mark.parametrize(
    ("fields", "lines", "expected"),
    [
        ({}, 1, None),
        ({"n": 3, "use_beam_search": False, "best_of": 1, "length_penalty": 1, "early_stopping": False}, 3, None),
        ({"use_beam_search": None}, 1, None),
        ({"use_beam_search": True}, 1, Beams(1)),
        ({"use_beam_search": True, "n": 4}, 4, Beams(4)),
        ({"use_beam_search": True, "n": 2, "best_of": 6}, 6, Beams(6)),
        (
            {"use_beam_search": True, "n": 2, "length_penalty": -0.5, "early_stopping": "never"},
            2,
            Beams(2, -0.5, "never"),
        ),
        (
            {"use_beam_search": True, "n": 2, "early_stopping": True, "temperature": 0, "seed": 3},
            2,
            Beams(2, 1.0, True),
        ),
    ],
)
def test_what_is_read(fields: dict[str, Any], lines: int, expected: Beams | None) -> None:
    assert beams(**fields) == (lines, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", 1),
        ("best_of", 1),
        ("best_of", 17),
        ("best_of", True),
        ("length_penalty", 11),
        ("length_penalty", "1"),
        ("early_stopping", "soon"),
        ("early_stopping", 1),
    ],
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    assert refused(**{"use_beam_search": True, "n": 2, name: value}) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("stop", ["x"]),
        ("logprobs", 0),
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 1),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("min_tokens", 2),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_would_bend_or_end_a_search_is_refused(name: str, value: Any) -> None:
    assert refused(use_beam_search=True, n=2, **{name: value}) == name


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 0.5), ("early_stopping", True)])
def test_its_fields_mean_nothing_without_it(name: str, value: Any) -> None:
    assert refused(**{name: value}) == name
