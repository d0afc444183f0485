"""A tenant's cached prefixes are its own, whatever a client claims (security 5, 7; gateway B13)."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest

from tests.e2e.harness import MODEL, Server

_topics = itertools.count()

# Everything that some server somewhere takes for an identity, a salt or a class.
FORGED_BODY: dict[str, Any] = {
    "cache_salt": "search",
    "tenant": "search",
    "tenant_id": "search",
    "user": "search",
    "priority": 100,
    "class": "interactive",
    "service_class": "interactive",
    "metadata": {"tenant": "search", "cache_salt": "search"},
}
FORGED_HEADERS = {
    "x-tenant": "search",
    "x-tenant-id": "search",
    "x-forebay-tenant": "search",
    "x-cache-salt": "search",
    "x-priority": "100",
    "x-forebay-class": "interactive",
    "baggage": "tenant=search",
    "x-forwarded-user": "search",
}


def prompt() -> str:
    """A text of several blocks that no other test sent; the first block holds the number already."""
    number = next(_topics)
    return f"{number} is the number of this story. " + f"Traveller {number} passes a milestone of the road. " * 6


def messages(text: str) -> list[dict[str, str]]:
    """With ``text`` in front: the template's own system prompt would be a common, and rightly cached, prefix."""
    return [{"role": "system", "content": text}, {"role": "user", "content": "Go on."}]


def cached(server: Server, tenant: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> int:
    """``cached_tokens`` of one request."""
    answer = httpx.post(
        server.info["url"] + path,
        json={"model": MODEL, "max_tokens": 2, "temperature": 0, **body},
        headers={**headers, **server.authorization(tenant)},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return int(json.loads(events[-1])["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_only_the_same_tenant_hits(server: Server, path: str, stream: bool, n: int) -> None:
    """security 5, 7: the same prompt twice by one tenant hits; by another never, with nothing or everything forged."""
    text = prompt()
    body: dict[str, Any] = {"n": n, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if path == "/v1/completions":
        body["prompt"] = text
    else:
        body["messages"] = messages(text)
    assert cached(server, "search", path, body, {}) == 0
    assert cached(server, "search", path, body, {}) > 0
    assert cached(server, "assist", path, body, {}) == 0
    forged = cached(server, "batch", path, {**body, **FORGED_BODY}, FORGED_HEADERS)
    assert forged == 0, "another tenant's cache was hit with forged fields"
    # And the forger gains no second name either: its own cache is under its own identity, forged fields or not.
    assert cached(server, "batch", path, body, {}) > 0


def test_a_salt_splits_nothing_and_joins_nothing(server: Server) -> None:
    """The scope is the gateway's: a client's salt neither opens another's cache nor hides its own."""
    body = {"messages": messages(prompt())}
    path = "/v1/chat/completions"
    assert cached(server, "search", path, {**body, "cache_salt": "one"}, {}) == 0
    assert cached(server, "search", path, {**body, "cache_salt": "two"}, {}) > 0
