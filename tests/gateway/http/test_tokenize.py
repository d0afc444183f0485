"""``/tokenize``, ``/detokenize``, ``/v1/embeddings``: answered by the model's own tokenizer, at a request each."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.gateway.harness import MODEL, Site, token, until
from tests.gateway.tiny_tokenizer import tiny_tokenizer
from workers.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {
    "tenants": [
        {"id": "alpha"},
        {"id": "beta", "models": ["other"]},
        {"id": "narrow", "limits": {"requests_per_minute": 2, "tokens_per_minute": 100, "concurrent": 1}},
    ]
}
CHAT = [{"role": "user", "content": "the quick <|im_end|> fox"}]


async def post(site: Site, path: str, tenant: str = "alpha", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token(tenant)}"}
    return await site.http.post(path, json={"model": MODEL, **body}, headers=headers)


async def test_a_text_and_back(shared: Site) -> None:
    text = "the quick brown fox, größer als 狐"
    answer = (await post(shared, "/tokenize", prompt=text)).json()
    assert answer["tokens"] == tiny_tokenizer().encode_text(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256 * 16
    assert answer["token_strs"] is None
    back = await post(shared, "/detokenize", tokens=answer["tokens"])
    assert back.json() == {"prompt": text}


async def test_a_chat_gives_the_tokens_that_a_request_would_send(shared: Site) -> None:
    answer = (await post(shared, "/tokenize", messages=CHAT, return_token_strs=True)).json()
    assert answer["tokens"] == tiny_tokenizer().encode_chat(CHAT)
    assert "".join(answer["token_strs"]) == (
        "<|im_start|>user\nthe quick <|im_end|> fox<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = await post(shared, "/v1/chat/completions", messages=CHAT, max_tokens=1)
    assert chat.json()["usage"]["prompt_tokens"] == answer["count"]
    bare = (await post(shared, "/tokenize", messages=CHAT, add_generation_prompt=False)).json()
    assert answer["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < answer["count"]


async def test_an_empty_text_has_no_tokens(shared: Site) -> None:
    assert (await post(shared, "/tokenize", prompt="")).json()["tokens"] == []
    assert (await post(shared, "/detokenize", tokens=[])).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "none"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "model": ""}, 400, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [2**40]}, 400, "tokens[0]"),
        ("/v1/embeddings", {"input": "a"}, 400, "model"),
        ("/v1/embeddings", {"input": [[5, 6], [7]]}, 400, "model"),
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": ["a", 5]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": [5, "a"]}, 400, "input[0]"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "model": "none"}, 404, "model"),
    ],
)
async def test_mistakes_are_named(shared: Site, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = await post(shared, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_stranger_and_a_tenant_without_the_model_get_nothing(shared: Site) -> None:
    for path in ("/tokenize", "/detokenize", "/v1/embeddings"):
        stranger = await shared.http.post(path, json={"model": MODEL, "prompt": "a", "tokens": [], "input": "a"})
        assert stranger.status_code == 401
        assert (await post(shared, path, "beta", prompt="a", tokens=[], input="a")).status_code == 404


async def test_each_costs_one_request_and_no_tokens(shared: Site) -> None:
    """gateway F1: with the headers that tell of it."""
    first = await post(shared, "/tokenize", "narrow", prompt="a" * 200)
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-tokens"] == "100"
    assert (await post(shared, "/detokenize", "narrow", tokens=[5])).status_code == 200
    refused = await post(shared, "/tokenize", "narrow", prompt="a")
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert shared.slots("narrow") == 0


async def test_long_texts_do_not_hold_up_the_others(shared: Site) -> None:
    """Each is worked on in a thread, whose turn comes beside the event loop's."""
    text = "the quick brown fox " * 3_000
    long = asyncio.gather(*(post(shared, "/tokenize", prompt=text) for _ in range(10)))
    answered = 0
    while not long.done():
        assert (await shared.http.get("/healthz")).status_code == 200
        answered += 1
    assert answered >= 3
    assert {answer.json()["count"] > 15_000 for answer in await long} == {True}
    await until(lambda: shared.gateway.parts.pipeline.active == 0, "it is over")


async def test_a_text_that_could_be_no_prompt_is_not_counted(shared: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bound as a prompt's: encoding megabytes takes seconds, and no answer would be of use."""
    most = 16 * 256 * 16
    for body in ({"prompt": "a" * (most + 1)}, {"messages": [{"role": "user", "content": "a" * (most + 1)}]}):
        with monkeypatch.context() as patched:
            patched.setattr(Tokenizer, "_encode", None)
            answer = await post(shared, "/tokenize", **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert answer.json()["error"]["param"] == next(iter(body))
    assert (await post(shared, "/tokenize", prompt="a" * most)).json()["count"] > 4096, "more than fits is told"
