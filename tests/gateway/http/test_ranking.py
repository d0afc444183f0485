"""``best_of`` and ``echo`` of completions: what is read, and what the answers look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.choices import ChoiceDelta, ScoredToken
from gateway.errors import ApiError
from gateway.http.openai import CompletionFormat, collect
from gateway.http.schemas import CompletionRequest, parse_chat, parse_completion
from policies.types import Usage


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def refused(**fields: Any) -> str | None:
    with pytest.raises(ApiError) as error:
        completion(**fields)
    assert error.value.status == 400
    return error.value.param


def test_what_is_drawn_is_what_counts() -> None:
    request = completion(n=2, best_of=5)
    assert (request.n, request.drawn, request.lines) == (2, 5, 5)
    assert "n" in completion(best_of=3).features()
    for same in ({}, {"n": 3, "best_of": 3}, {"best_of": None}, {"best_of": 1, "stream": True}):
        assert completion(**same).drawn is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": "2"}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == param


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"echo": True}])
def test_chats_have_neither(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ApiError) as error:
        parse_chat(json.dumps(body).encode())
    assert error.value.param == next(iter(fields))


def form(request: CompletionRequest, echo: str = "") -> CompletionFormat:
    return CompletionFormat(
        job_id="j", model="m", created=1, logprobs=request.params.logprobs, request=request, echo=echo
    )


def scored(*logprobs: float) -> tuple[ScoredToken, ...]:
    return tuple(ScoredToken(b"x", logprob) for logprob in logprobs)


def test_the_likeliest_per_token_are_given_in_order() -> None:
    """A long likely answer beats a short unlikely one; one without a token comes last."""
    deltas = [
        ChoiceDelta(0, "short", scored=scored(-1.0), finish="stop"),
        ChoiceDelta(1, "long", scored=scored(*[-0.4] * 9), finish="length"),
        ChoiceDelta(2, "", finish="stop"),
        ChoiceDelta(3, "best", scored=scored(-0.1, -0.2), finish="stop"),
    ]
    given = form(completion(n=3, best_of=4)).full(collect(deltas, 4), Usage())["choices"]
    assert [(choice["index"], choice["text"]) for choice in given] == [(0, "best"), (1, "long"), (2, "short")]
    assert all(choice["logprobs"] is None for choice in given)
    with_scores = form(completion(best_of=4, logprobs=0)).full(collect(deltas, 4), Usage())["choices"]
    assert with_scores[0]["logprobs"]["token_logprobs"] == [-0.1, -0.2]


def test_the_prompt_comes_first_and_once_per_choice() -> None:
    deltas = [
        ChoiceDelta(0),
        ChoiceDelta(0, "a"),
        ChoiceDelta(1, "b"),
        ChoiceDelta(0, "c", finish="stop"),
        ChoiceDelta(1, finish="length"),
    ]
    request = completion(n=2, echo=True)
    whole = form(request, "p").full(collect(deltas, 2), Usage())["choices"]
    assert [choice["text"] for choice in whole] == ["pac", "pb"]
    texts = ["", ""]
    streamed = form(request, "p")
    for chunk in (chunk for delta in deltas for chunk in streamed.chunks(delta)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["pac", "pb"]
