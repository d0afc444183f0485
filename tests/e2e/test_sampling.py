"""Sampling fields end to end on the real model."""

from __future__ import annotations

from typing import Any

from tests.e2e.harness import MODEL, Server

PROMPT = "The capital of France is"


def test_best_of_gives_the_likeliest_of_what_n_would_draw(server: Server) -> None:
    client = server.client()
    arguments: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "seed": 11, "temperature": 1.5}
    drawn = client.completions.create(**arguments, n=4, logprobs=0)
    means = []
    for choice in drawn.choices:
        assert choice.logprobs is not None
        values = [value for value in choice.logprobs.token_logprobs or [] if value is not None]
        means.append(sum(values) / len(values))
    best = client.completions.create(**arguments, best_of=4)
    assert best.choices[0].text == drawn.choices[means.index(max(means))].text
    assert best.choices[0].logprobs is None
    assert best.usage is not None
    assert drawn.usage is not None
    assert best.usage.completion_tokens == drawn.usage.completion_tokens


def test_echo_of_text_and_of_ids(server: Server) -> None:
    client = server.client()
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    text = client.completions.create(prompt=PROMPT, **arguments).choices[0].text
    assert client.completions.create(prompt=PROMPT, echo=True, **arguments).choices[0].text == PROMPT + text
    ids = client.completions.create(prompt=[504, 3575, 282, 4649, 314], echo=True, **arguments).choices[0].text
    assert ids == PROMPT + text
    streamed = client.completions.create(prompt=PROMPT, echo=True, stream=True, **arguments)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == PROMPT + text


def test_banned_words_stop_tokens_and_penalties_reach_the_sampler(server: Server) -> None:
    client = server.client()
    arguments: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    plain = client.completions.create(**arguments).choices[0].text
    assert "Paris" in plain
    banned = client.completions.create(**arguments, extra_body={"bad_words": ["Paris"]}).choices[0].text
    assert "Paris" not in banned
    scores = client.completions.create(**arguments, logprobs=1).choices[0].logprobs
    assert scores is not None
    stop = server.client().post("/../tokenize", body={"model": MODEL, "prompt": " Paris"}, cast_to=object)
    [paris] = stop["tokens"]  # type: ignore[index]
    ended = client.completions.create(**arguments, extra_body={"stop_token_ids": [paris]}).choices[0]
    assert ended.finish_reason == "stop"
    assert ended.text == plain[: plain.index("Paris") + len("Paris")]
    loop: dict[str, Any] = {**arguments, "prompt": "a a a a a a a a a a a a", "max_tokens": 16}
    repeated = client.completions.create(**loop).choices[0].text
    varied = client.completions.create(**loop, extra_body={"repetition_penalty": 2.0}).choices[0].text
    assert varied != repeated  # how much it varies is the model's affair: the last bits of a kernel decide that
