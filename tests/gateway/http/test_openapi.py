"""``/openapi.json`` says what the parsers read, and the gateway does what it says: schemathesis tries to disagree."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import msgspec
import pytest
import schemathesis
from schemathesis.specs.openapi import checks

from gateway.app import ENDPOINTS
from gateway.http import openapi
from gateway.http.embeddings import parse_embeddings
from gateway.http.responses import parse_responses
from gateway.http.schemas import parse_chat, parse_completion
from gateway.http.tokenize import parse_detokenize, parse_tokenize
from tests.gateway.harness import MODEL, pool, running, token

PARSERS: Mapping[str, Callable[[bytes], Any]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_responses,
    "/v1/embeddings": parse_embeddings,
    "/tokenize": parse_tokenize,
    "/detokenize": parse_detokenize,
}
DOCUMENT = json.loads(openapi.document("1"))


class Watched(dict[str, msgspec.Raw]):
    """Notes which fields a parser asks for."""

    def __init__(self, fields: Mapping[str, msgspec.Raw]) -> None:
        super().__init__(fields)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("route", PARSERS)
def test_every_field_that_is_read_is_documented_and_no_other(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, body = PARSERS[route], openapi.BODIES[route]
    bodies: Mapping[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "use_beam_search": True},
        "/v1/completions": {"prompt": "a", "use_beam_search": True},
        "/v1/responses": {"input": "a"},
        "/v1/embeddings": {"input": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": []},
    }
    asked: set[str] = set()

    def split(raw: bytes) -> Watched:
        fields = Watched(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
        fields.asked = asked
        return fields

    monkeypatch.setattr(f"{parse.__module__}.split", split)
    parse(json.dumps({"model": "m", **bodies[route]}).encode())
    assert asked == set(body.fields)


def test_every_route_is_documented() -> None:
    assert {endpoint.route for endpoint in ENDPOINTS} == set(openapi.BODIES)
    assert set(DOCUMENT["paths"]) >= {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/usage",
        "/healthz",
        "/readyz",
        "/openapi.json",
    }


def test_bounds_of_the_parsers_are_in_the_document() -> None:
    chat = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert (chat["temperature"]["minimum"], chat["temperature"]["maximum"]) == (0, 2)
    assert chat["top_p"]["exclusiveMinimum"] == 0
    assert chat["n"]["maximum"] == 16
    assert chat["logit_bias"]["maxProperties"] == 1024
    assert chat["model"]["maxLength"] == 256
    assert chat["seed"]["type"] == ["integer", "null"]


# -- schemathesis ------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "listen": {"port": 0, "refused_per_minute": None},
    "models": [pool(max_running=32)],
    "timeouts": {"first_token_s": 20, "total_s": 30},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway with an echo worker, in a thread: schemathesis is synchronous."""
    folder = tmp_path_factory.mktemp("openapi")
    started: list[str] = []
    up, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running(folder, SETTINGS) as site:
            started.append(site.url)
            up.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert up.wait(30)
    yield started[0]
    done.set()
    thread.join(30)


POSITIVE, NEGATIVE = schemathesis.GenerationMode
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


def modest(body: Any, number: int) -> Any:
    """Of three bodies one stays as it is. The others ask for the model that is there, for little output, in token ids
    that it has, and keep few of their optional fields: with all of them two would contradict each other each time."""
    if not isinstance(body, dict) or number % 3 == 0:
        return body
    needed = {"model", "messages", "prompt", "input", "tokens"}
    kept = [name for i, name in enumerate(sorted(body.keys() - needed)) if (i + number) % 7 == 0]
    body = {name: body[name] for name in [*(body.keys() & needed), *kept]} | {"model": MODEL}
    if isinstance(body.get("messages"), list):
        messages = [message for message in body["messages"] if isinstance(message, dict)]
        body["messages"] = [{"role": "user", "content": str(message.get("content"))} for message in messages]
    if {"messages", "prompt"} <= body.keys():
        del body["messages"]
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], 8)
    for name in ("prompt", "tokens"):
        if isinstance(body.get(name), list):
            body[name] = [abs(token) % 256 for token in body[name] if isinstance(token, int)] or [5]
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {str(int(token) % 256): bias for token, bias in body["logit_bias"].items()}
    return body


def attack(url: str, cases: int) -> None:
    """Send so many requests, over all operations, well-formed and not; AssertionError with the smallest that breaks a
    promise."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    each = cases // len(posts) // 2
    served = {"count": 0}
    sent = sum(send(operation, POSITIVE, each if operation in posts else 1, served) for operation in operations)
    sent += sum(send(operation, NEGATIVE, each, served) for operation in posts)
    assert sent >= cases * 0.8
    assert served["count"] >= cases / 20, "the requests get past the parsers"
    assert httpx.get(f"{url}/readyz").status_code == 200


def send(operation: Any, mode: schemathesis.GenerationMode, examples: int, served: dict[str, int]) -> int:
    """Send requests of one operation; how many there were. ``served`` counts those that had an answer."""
    numbers = itertools.count()
    headers = {"authorization": f"Bearer {token('alpha')}"}

    @hypothesis.given(case=operation.as_strategy(mode))
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def one(case: schemathesis.Case) -> None:
        number = next(numbers)
        if mode is POSITIVE:
            case.body = modest(case.body, number)
        if number % 4:  # keys come up again and again, and mostly with another body
            case.headers.pop("Idempotency-Key", None)
        answer = case.call(headers=headers, timeout=40)
        # A body that is too large is refused unread: schemathesis does not count 413 among refusals.
        unread = [checks.negative_data_rejection] if answer.status_code == 413 else []
        case.validate_response(answer, checks=CHECKS, excluded_checks=unread, headers=headers)
        served["count"] += answer.status_code == 200

    one()
    return next(numbers)


def test_500_cases_get_what_the_document_says(url: str) -> None:
    """No 5xx, no hang, every answer in its documented shape."""
    attack(url, 500)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_10_000_cases_get_what_the_document_says(url: str) -> None:
    attack(url, 10_000)


def test_the_document_needs_no_credential_and_is_valid(url: str, tmp_path: Path) -> None:
    answer = httpx.get(f"{url}/openapi.json", timeout=30)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["openapi"] == "3.1.0"
    assert f'"{MODEL}"' not in answer.text.replace('"echo":', ""), "nothing of this deployment (echo is a field too)"
    assert "alpha" not in answer.text
