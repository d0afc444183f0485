"""Completions that repeat their prompt with its log probabilities (``echo`` and ``logprobs``)."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from gateway.choices import ChoiceDelta, ScoredToken
from gateway.echo import PromptScores
from gateway.http.openai import CompletionFormat
from tests.gateway.harness import Settlements, Site
from tests.gateway.tiny_tokenizer import tiny_tokenizer
from workers.protocol import SequenceOutput, TokenLogprob

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {
    "tenants": [{"id": "alpha"}],
}
PROMPT = tiny_tokenizer().encode_text("Hi, fox!")


async def complete(site: Site, **fields: Any) -> Any:
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 1, "echo": True}
    return await site.client().completions.create(**{**body, **fields})


def judged(before: list[int]) -> list[float | None]:
    """What the echo worker says of each token."""
    return [None, *(-(token % 8) / 8 - 0.25 for token in before[:-1])]


async def test_prompt_and_answer_stand_in_one_row(shared: Site) -> None:
    answer = await complete(shared)
    (choice,) = answer.choices
    told = choice.logprobs
    text = choice.text
    assert len(told.tokens) == len(PROMPT) + 3 == len(told.top_logprobs) == len(told.text_offset)
    assert told.token_logprobs == [*judged(PROMPT), -0.5, -0.5, -0.5]
    assert told.top_logprobs[0] is None
    assert all(token in top for token, top in zip(told.tokens[1:], told.top_logprobs[1:], strict=True))
    assert [text[start : start + len(token)] for token, start in zip(told.tokens, told.text_offset, strict=True)] == (
        told.tokens
    )
    assert "".join(told.tokens) == text
    assert answer.usage.prompt_tokens == len(PROMPT)


async def test_cached_prompts_are_scored_again_and_say_that_nothing_was_cached(shared: Site) -> None:
    """engine A13."""
    prompt = [*range(40, 120), *PROMPT]
    plain = [await complete(shared, prompt=prompt, echo=False, logprobs=None) for _ in range(2)]
    assert plain[1].usage.prompt_tokens_details.cached_tokens > 0
    answers = [await complete(shared, prompt=prompt) for _ in range(2)]
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 0]
    assert all(answer.choices[0].logprobs.token_logprobs[: len(prompt)] == judged(prompt) for answer in answers)


async def test_a_stream_tells_the_prompt_once_per_choice_and_first(shared: Site) -> None:
    seen: dict[int, list[Any]] = {0: [], 1: []}
    async for chunk in await complete(shared, n=2, stream=True):
        for choice in chunk.choices:
            seen[choice.index].append(choice)
    whole = await complete(shared, n=2)
    for index, chunks in seen.items():
        first = chunks[0].logprobs
        assert first.token_logprobs == judged(PROMPT)
        rest = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.token_logprobs]
        assert rest == whole.choices[index].logprobs.token_logprobs
        offsets = [place for chunk in chunks if chunk.logprobs for place in chunk.logprobs.text_offset]
        assert offsets == whole.choices[index].logprobs.text_offset
        assert "".join(chunk.text for chunk in chunks) == whole.choices[index].text


async def test_no_output_at_all_is_the_prompt_and_its_scores(shared: Site) -> None:
    """As evaluation harnesses ask for the likelihood of a text; also as a stream, and several times over."""
    quota = Settlements(shared)
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "n": 2}, {"max_tokens": 0, "prompt": [72]}):
        prompt: list[int] = fields.get("prompt", PROMPT)  # type: ignore[assignment]
        whole = await complete(shared, **fields)
        for choice in whole.choices:
            assert choice.logprobs.token_logprobs == judged(prompt)
            assert choice.text == "".join(choice.logprobs.tokens)
            assert choice.finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 0)
        chunks = [
            chunk
            async for chunk in await complete(shared, **fields, stream=True, stream_options={"include_usage": True})
        ]
        assert chunks[-1].usage == whole.usage
        for choice in whole.choices:
            said = [found for chunk in chunks for found in chunk.choices if found.index == choice.index]
            assert [(one.text, one.finish_reason) for one in said] == [(choice.text, None), ("", "length")]
            assert said[0].logprobs == choice.logprobs
    quota.close()
    assert {usage.output for usage in quota.usages} == {0}
    plain = await complete(shared, max_tokens=0, logprobs=None)
    assert (plain.choices[0].logprobs, plain.usage.completion_tokens) == (None, 0)
    assert plain.choices[0].text == tiny_tokenizer().decode(PROMPT)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": False}, "max_tokens"),
        ({"echo": False, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=str,
)
async def test_no_output_needs_a_prompt_to_tell(shared: Site, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, **fields}
    refused = await shared.complete(**body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_choice_that_is_faster_than_the_prompt_waits_for_it() -> None:
    """Where no blocks are shared each choice computes the prompt itself, and the one that scores it may be last."""
    made = CompletionFormat(job_id="j", model="m", created=1, logprobs=0, echo="ab", scored_prompt=2)
    first, second = ScoredToken(b"a", 0.0), ScoredToken(b"b", -1.0, (), 1)
    assert made.chunks(ChoiceDelta(1, "x", 1, (ScoredToken(b"x", -2.0),))) == []
    assert made.chunks(ChoiceDelta(0, prompt=(first,))) == []
    chunks = made.chunks(ChoiceDelta(0, "y", 1, (ScoredToken(b"y", -3.0),), prompt=(second,)))
    said = [(chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks]
    assert said == [(1, "ab"), (1, "x"), (0, "ab"), (0, "y")]
    told = [chunk["choices"][0]["logprobs"]["token_logprobs"] for chunk in chunks]
    assert told == [[None, -1.0], [-2.0], [None, -1.0], [-3.0]]


async def test_one_token_text_and_the_best_of_several(shared: Site) -> None:
    alone = await complete(shared, prompt=[72], logprobs=0)
    assert alone.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert alone.choices[0].logprobs.top_logprobs is None
    text = await complete(shared, prompt="the fox", best_of=3)
    assert text.choices[0].text.startswith("the fox")
    told = text.choices[0].logprobs
    assert "".join(told.tokens) == text.choices[0].text
    assert told.token_logprobs[0] is None


async def test_what_a_long_prompt_costs_is_one_prompt(shared: Site) -> None:
    """Longer than a step scores: it comes in parts, beside others."""
    prompts = [[*range(20 + turn, 20 + turn + 150)] for turn in range(4)]
    answers = await asyncio.gather(*(complete(shared, prompt=prompt) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.choices[0].logprobs.token_logprobs[: len(prompt)] == judged(prompt)
        assert answer.usage.prompt_tokens == len(prompt)


async def test_other_endpoints_still_say_where_to_ask(shared: Site) -> None:
    with pytest.raises(openai.BadRequestError, match="'echo' and 'logprobs'"):
        await complete(shared, echo=False, extra_body={"prompt_logprobs": 1})


async def test_messages_that_come_twice_are_taken_once() -> None:
    tokenizer = tiny_tokenizer()
    scores = PromptScores([72, 73, 74, 75], tokenizer.decoder(), tokenizer.token_bytes)
    first = SequenceOutput("a", prompt_logprobs=[TokenLogprob(73, -1.0)], prompt_scored=1)
    both = SequenceOutput("a", prompt_logprobs=[TokenLogprob(73, -1.0), TokenLogprob(74, -2.0)], prompt_scored=2)
    last = SequenceOutput("a", prompt_logprobs=[TokenLogprob(75, -3.0)], prompt_scored=3)
    told = [scores.take(output) for output in (first, first, both, last, last)]
    assert [[entry.logprob for entry in entries] for entries in told] == [[0.0, -1.0], [], [-2.0], [-3.0], []]
