"""What users have: the official client, both its kinds; LangChain, the ``llm`` command, curl, a socket."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import psutil
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.e2e.harness import MODEL, Server, token

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SHORT: dict[str, Any] = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}


def test_chat_answers_paris(server: Server) -> None:
    answer = server.client().chat.completions.create(**SHORT)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == MODEL


def test_chat_streamed_is_the_same_text(server: Server) -> None:
    client = server.client()
    whole = client.chat.completions.create(**SHORT)
    stream = client.chat.completions.create(**SHORT, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_the_async_client_too(server: Server) -> None:
    async with server.async_client() as client:
        whole = await client.chat.completions.create(**SHORT)
        stream = await client.chat.completions.create(**SHORT, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content


def test_completions_with_text_and_with_token_ids(server: Server) -> None:
    client = server.client()
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    text = client.completions.create(prompt="The capital of France is", **arguments)
    assert "Paris" in text.choices[0].text
    streamed = client.completions.create(prompt="The capital of France is", stream=True, **arguments)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == text.choices[0].text
    ids = client.completions.create(prompt=[504, 3575, 282, 4649, 314], **arguments)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 5
    assert ids.choices[0].text


def test_beam_search_gives_the_likeliest_answers_best_first(server: Server) -> None:
    client = server.client()
    found = client.completions.create(
        model=MODEL,
        prompt="The capital of France is",
        max_tokens=8,
        n=2,
        best_of=4,
        extra_body={"use_beam_search": True, "length_penalty": 1.0},
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    assert "Paris" in found.choices[0].text
    assert found.choices[0].text != found.choices[1].text
    assert found.usage is not None
    assert found.usage.completion_tokens == 4 * 8, "every beam's tokens ran"


async def test_completions_async(server: Server) -> None:
    async with server.async_client() as client:
        answer = await client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=4, temperature=0)
        stream = await client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=4, temperature=0, stream=True
        )
        parts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
    assert "".join(parts) == answer.choices[0].text


def test_several_choices_logprobs_and_stop(server: Server) -> None:
    client = server.client()
    several = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, n=3, seed=7, max_tokens=5, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    for choice in several.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(item.top_logprobs) == 2 and item.logprob <= 0 for item in choice.logprobs.content)
    stopped = client.chat.completions.create(**SHORT, stop=["Paris"])
    assert "Paris" not in (stopped.choices[0].message.content or "")
    assert stopped.choices[0].finish_reason == "stop"


def test_responses_say_the_same_as_a_chat(server: Server) -> None:
    client = server.client()
    chat = client.chat.completions.create(**SHORT)
    asked: dict[str, Any] = {"model": MODEL, "input": CAPITAL, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.total_tokens == chat.usage.total_tokens


class Capital(BaseModel):
    country: Literal["France", "Spain"]
    city: Literal["Madrid", "Paris"]


def test_responses_are_parsed_into_the_callers_type(server: Server) -> None:
    """``text.format`` is enforced as a chat's ``response_format`` is."""
    asked: dict[str, Any] = {"model": MODEL, "input": CAPITAL, "temperature": 0, "max_output_tokens": 60}
    answer = server.client().responses.parse(**asked, text_format=Capital)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Capital)


def test_tokens_are_counted_as_a_chat_counts_them(server: Server) -> None:
    headers = server.authorization("search")
    url = server.info["url"]
    counted = httpx.post(
        f"{url}/tokenize", json={"model": MODEL, "messages": CAPITAL}, headers=headers, timeout=60
    ).json()
    chat = server.client().chat.completions.create(**SHORT)
    assert chat.usage is not None
    assert counted["count"] == chat.usage.prompt_tokens
    ids = {"model": MODEL, "tokens": counted["tokens"]}
    text = httpx.post(f"{url}/detokenize", json=ids, headers=headers, timeout=60).json()
    assert "What is the capital of France?<|im_end|>" in text["prompt"]


def langchain(server: Server, responses: bool, most: int) -> ChatOpenAI:
    """Of the tenant ``search``, by one of the two APIs."""
    return ChatOpenAI(
        base_url=server.info["base_url"],
        api_key=SecretStr(token("search")),
        model=MODEL,
        temperature=0,
        max_completion_tokens=most,
        max_retries=0,
        stream_usage=True,
        use_responses_api=responses,
    )


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(server: Server, responses: bool) -> None:
    model = langchain(server, responses, 24)
    whole = model.invoke("What is the capital of France?")
    assert "Paris" in whole.text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = list(model.stream("What is the capital of France?"))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) > 0


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain_calls_tools_and_parses(server: Server, responses: bool) -> None:
    """A call there and back, and an answer as an object, in the forms that it sends them in."""
    model = langchain(server, responses, 80)
    asked = HumanMessage("What is the capital of France?")
    called = model.bind_tools([Capital], tool_choice="Capital").invoke([asked])
    [call] = called.tool_calls
    assert call["name"] == "Capital"
    Capital.model_validate(call["args"])
    talk = [asked, called, ToolMessage("It is right.", tool_call_id=str(call["id"]))]
    assert model.bind_tools([Capital], tool_choice="none").invoke(talk).text
    assert isinstance(model.with_structured_output(Capital).invoke([asked]), Capital)


@pytest.mark.parametrize("flags", [[], ["--no-stream"]], ids=["streamed", "whole"])
def test_the_llm_command(server: Server, tmp_path: Path, flags: list[str]) -> None:
    entry = (
        f"- model_id: forebay\n  model_name: {MODEL}\n  api_base: {server.info['base_url']}\n  api_key_name: forebay\n"
    )
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    (tmp_path / "keys.json").write_text(json.dumps({"forebay": token("search")}))
    command = [sys.executable, "-m", "llm", "-m", "forebay", "-o", "temperature", "0", "-o", "max_tokens", "24", *flags]
    done = subprocess.run(
        [*command, "What is the capital of France?"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert "Paris" in done.stdout


def on_a_socket(server: Server, request: bytes) -> bytes:
    """What comes back over a connection that the server ends."""
    with socket.create_connection(("127.0.0.1", server.info["port"]), timeout=60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_client_made_of_a_socket(server: Server) -> None:
    """HTTP/1.1 with chunks, two requests in one piece, and HTTP/1.0, whose end is the connection's."""
    body = json.dumps({**SHORT, "stream": True}).encode()
    head = f"host: x\r\nauthorization: Bearer {token('search')}\r\ncontent-length: {len(body)}\r\n".encode()
    first = b"POST /v1/chat/completions HTTP/1.1\r\n" + head + b"\r\n" + body
    last = b"POST /v1/chat/completions HTTP/1.1\r\nconnection: close\r\n" + head + b"\r\n" + body
    answers = on_a_socket(server, first + last).split(b"HTTP/1.1 200 OK\r\n")[1:]
    texts = [chat_text(unchunked(answer.partition(b"\r\n\r\n")[2])) for answer in answers]
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
    old = on_a_socket(server, b"POST /v1/chat/completions HTTP/1.0\r\n" + head + b"\r\n" + body)
    assert chat_text(old.partition(b"\r\n\r\n")[2]) == texts[0]


def unchunked(body: bytes) -> bytes:
    """A chunked body's content. Fails where a chunk is not as long as it says, or the last one is missing."""
    content = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        assert body[length : length + 2] == b"\r\n"
        content, body = content + body[:length], body[length + 2 :]
        if not length:
            assert body == b""
            return content


def chat_text(stream: bytes) -> str:
    """The text of a whole stream of chat chunks."""
    events = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])


def test_models_are_listed(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == [MODEL]
    assert server.client().models.retrieve(MODEL).id == MODEL


def test_the_client_raises_its_own_errors(server: Server) -> None:
    """Statuses and bodies are the ones the client maps to its exceptions."""
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nothing", messages=CAPITAL)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=9)
    assert bad.value.param == "temperature"
    stranger = openai.OpenAI(base_url=server.info["base_url"], api_key="nothing", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_curl(server: Server, stream: bool) -> None:
    curl = shutil.which("curl")
    assert curl, "curl is part of every system this runs on"
    done = subprocess.run(
        [
            *[curl, "-sS", "-N", "-i", "--max-time", "60", server.info["base_url"] + "/chat/completions"],
            *["-H", f"Authorization: Bearer {token('assist')}", "-H", "Content-Type: application/json"],
            *["-d", json.dumps({**SHORT, "stream": stream})],
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    head, _, body = done.stdout.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "x-request-id:" in head.lower()
    if stream:
        events = [line.removeprefix("data: ") for line in body.splitlines() if line]
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    else:
        text = json.loads(body)["choices"][0]["message"]["content"]
    assert "Paris" in text


def test_the_gateway_process_has_no_torch_mapped(server: Server) -> None:
    server.client().chat.completions.create(**SHORT)
    gateway = {path.path for path in psutil.Process(server.process.pid).memory_maps()}
    assert [path for path in gateway if "torch" in path] == []
    worker = {path.path for process in server.workers() for path in process.memory_maps()}
    assert [path for path in worker if "libtorch" in path], "the check would see torch where it is"
