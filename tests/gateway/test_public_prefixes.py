"""Prefixes that the operator registered are shared between tenants; nothing else is, and not for longer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.compose import BuildError
from gateway.public_prefixes import FILE, MAX_PER_MODEL, PublicPrefix, PublicPrefixes, TooManyPrefixesError
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, token

PUBLIC = {"policies": {"cache_scope": {"use": "public_prefix"}}}
SYSTEM = "You are the assistant of this house. Answer briefly, in the language of the question, and name your sources."


async def chat(site: Site, tenant: str, question: str, system: str = SYSTEM) -> int:
    """One chat; returns how many prompt tokens were cached."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "ignore_eos": True}
    headers = {"authorization": f"Bearer {token(tenant)}"}
    answer = await site.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def register(site: Site, **body: Any) -> httpx.Response:
    return await site.admin.post("/admin/public-prefixes", json={"model": MODEL, **body})


async def test_tenants_share_a_registered_system_prompt_and_nothing_behind_it(start: Start) -> None:
    """DESIGN §7: only blocks wholly inside it; the questions behind are each tenant's own."""
    question = "a question that is long enough to fill blocks of its own, and then some more " * 2
    async with start(PUBLIC) as site:
        assert await chat(site, "alpha", "before it was registered") == 0
        assert await chat(site, "beta", "before it was registered") == 0
        answer = await register(site, messages=[{"role": "system", "content": SYSTEM}], name="house")
        assert answer.status_code == 201, answer.text
        made = answer.json()
        assert made["shared_blocks"] == made["tokens"] // 16 >= 3
        assert await chat(site, "alpha", question) == 0
        assert await chat(site, "beta", question) == made["shared_blocks"] * 16
        assert await chat(site, "beta", question) > made["shared_blocks"] * 16
        shown = (await site.admin.get("/admin/cache")).json()
        assert shown["public_prefixes"] == [made]
        assert SYSTEM[:10] not in str(shown)


async def test_a_prompt_that_leaves_the_prefix_inside_is_private_from_there_on(start: Start) -> None:
    async with start(PUBLIC) as site:
        text = "the quick brown fox jumps over the lazy dog " * 8
        tokens = (await register(site, text=text)).json()["tokens"]
        assert tokens > 48
        half = text[: len(text) // 2] + "and then something else entirely, which is nobody's business " * 3
        for tenant in ("alpha", "beta"):
            answer = await site.complete(tenant, prompt=half, max_tokens=2)
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached <= tokens // 2 + 16


async def test_an_unregistered_prefix_is_zeroed_and_shared_no_more(start: Start) -> None:
    async with start(PUBLIC) as site:
        made = (await register(site, messages=[{"role": "system", "content": SYSTEM}])).json()
        await chat(site, "alpha", "one")
        assert await chat(site, "beta", "two") > 0
        # A purge of everybody who used it leaves it: it is nobody's.
        await site.admin.delete("/admin/tenants/alpha/cache")
        assert await chat(site, "beta", "three") > 0
        answer = await site.admin.delete(f"/admin/public-prefixes/{made['id']}")
        assert answer.status_code == 200
        assert answer.json()["zeroed_blocks"] == made["shared_blocks"]
        assert answer.json()["subject"] == {"public_prefix": [made["id"]]}
        assert await chat(site, "alpha", "four") == 0
        assert await chat(site, "beta", "five") == 0
        assert (await site.admin.delete(f"/admin/public-prefixes/{made['id']}")).status_code == 404


async def test_blocks_that_another_public_prefix_still_covers_stay(start: Start) -> None:
    async with start(PUBLIC) as site:
        short = "the quick brown fox jumps over the lazy dog " * 4
        one = (await register(site, text=short)).json()
        two = (await register(site, text=short + "the capital of the country " * 8)).json()
        await site.complete("alpha", prompt=short + "the capital of the country " * 8, max_tokens=2)
        gone = (await site.admin.delete(f"/admin/public-prefixes/{two['id']}")).json()
        assert gone["zeroed_blocks"] == two["shared_blocks"] - one["shared_blocks"]
        answer = await site.complete("beta", prompt=short + " x", max_tokens=2)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16 * (one["shared_blocks"] - 1)


async def test_without_the_policy_a_registered_prefix_is_shared_by_nobody(start: Start) -> None:
    async with start() as site:
        await register(site, messages=[{"role": "system", "content": SYSTEM}])
        await chat(site, "alpha", "one")
        assert await chat(site, "beta", "two") == 0


async def test_prefixes_outlive_the_process(start: Start, tmp_path: Path) -> None:
    changes = {**PUBLIC, "state": {"path": "state"}}
    async with start(changes) as site:
        made = (await register(site, text="the quick brown fox " * 20, name="fox")).json()
    async with start(changes) as site:
        assert (await site.admin.get("/admin/cache")).json()["public_prefixes"] == [made]
        await site.complete("alpha", prompt="the quick brown fox " * 20, max_tokens=2)
        answer = await site.complete("beta", prompt="the quick brown fox " * 20, max_tokens=2)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    (tmp_path / "state" / FILE).write_text("[{}]")
    with pytest.raises(BuildError, match=r"state\.path"):
        async with start(changes):
            pass


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"text": "the quick brown fox"}, 400, "text"),
        ({"text": ""}, 400, "text"),
        ({}, 400, "text"),
        ({"text": "a", "messages": []}, 400, "messages"),
        ({"text": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tenant": "y"}]}, 400, "messages[0]"),
        ({"text": "a", "public": True}, 400, "public"),
        ({"text": "a", "name": "x" * 129}, 400, "name"),
        ({"text": "a", "model": "nosuch"}, 404, "model"),
        ({"text": 5}, 400, "text"),
    ],
)
async def test_what_cannot_be_registered_is_refused(
    shared: Site, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await register(shared, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


test_what_cannot_be_registered_is_refused = pytest.mark.asyncio(loop_scope="module")(
    test_what_cannot_be_registered_is_refused
)


async def test_a_model_has_a_bounded_number_of_them() -> None:
    prefixes = PublicPrefixes()
    made = [PublicPrefix.of("m", "", [number, 1]) for number in range(MAX_PER_MODEL)]
    await asyncio.gather(*(prefixes.add(prefix) for prefix in made))
    assert (await prefixes.add(made[3])).id == made[3].id
    with pytest.raises(TooManyPrefixesError):
        await prefixes.add(PublicPrefix.of("m", "", [9, 9]))
    assert prefixes.match("m", [3, 1, 7]) == 2
    assert prefixes.match("m", [3, 2]) == 1
    assert prefixes.match("m", []) == prefixes.match("other", [3, 1]) == 0
