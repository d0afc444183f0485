"""Models with several pools: shares, canaries, fallbacks by reason, and what a failing server costs others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Site, token, until
from tests.gateway.tool_templates import MISTRAL_LISTED, MISTRAL_TOKENS
from tests.plugins.openai_upstream.conftest import Front, upstream
from tests.plugins.openai_upstream.scripted import Exchange, Scripted, scripted, stream
from tests.workers import tiny_tokenizer
from workers.testing import Echo


async def good(exchange: Exchange) -> None:
    await exchange.whole(stream("ok"))


async def slow(exchange: Exchange) -> None:
    await asyncio.sleep(0.3)
    await exchange.whole(stream("ok"))


async def busy(exchange: Exchange) -> None:
    await exchange.whole(b"{}", 429, retry_after="9")


async def broken(exchange: Exchange) -> None:
    await exchange.whole(b"{}", 500)


async def frozen(exchange: Exchange) -> None:
    await exchange.gone()


@contextlib.asynccontextmanager
async def servers(*scripts: Any) -> AsyncIterator[list[Scripted]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(scripted(script)) for script in scripts]


def pool(server: Scripted, name: str, settings: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {**upstream(server.url, name, **(settings or {})), **keys}


async def ready(site: Site, workers: int) -> None:
    await until(lambda: len(site.dispatcher.workers) == workers, "all servers are there")


async def as_user(site: Site, user: str) -> int:
    headers = {"authorization": f"Bearer {token('alpha', sub=user)}"}
    body = {"model": MODEL, "prompt": [5], "max_tokens": 1}
    return (await site.http.post("/v1/completions", json=body, headers=headers)).status_code


def counts(found: list[Scripted]) -> list[int]:
    return [len(server.requests) for server in found]


async def test_requests_are_shared_by_weight(front: Front) -> None:
    async with servers(good, good, good) as found:
        pools = [pool(server, name, weight=w) for server, name, w in zip(found, "abc", (4, 2, 1), strict=True)]
        async with front(pools=pools) as site:
            await ready(site, 3)
            for _ in range(35):
                assert (await site.complete()).status_code == 200
            for count, share in zip(counts(found), (20, 10, 5), strict=True):
                assert abs(count - share) <= 1


async def test_weights_never_leave_room_unused(front: Front) -> None:
    """The pool whose turn it is is full: the request goes where there is room, and does not wait."""
    over = asyncio.Event()

    async def full(exchange: Exchange) -> None:
        await over.wait()
        await good(exchange)

    async with servers(full, good) as found:
        pools = [pool(found[0], "a", {"max_running": 1}, weight=100), pool(found[1], "b", weight=1)]
        async with front(pools=pools) as site:
            await ready(site, 2)
            asked = [asyncio.create_task(site.complete()) for _ in range(20)]
            await until(lambda: sum(counts(found)) == 20, "none waits for the full one")
            assert counts(found)[0] <= 2, "its place, and the one at its door"
            over.set()
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_a_canary_has_the_same_callers_always_and_about_its_part(front: Front) -> None:
    async with servers(good, good) as found:
        pools = [pool(found[0], "old"), pool(found[1], "new", canary={"percent": 30, "by": "user"})]
        async with front(pools=pools) as site:
            await ready(site, 2)
            users = [f"user-{number}" for number in range(60)]
            first: list[str] = []
            for _ in range(2):
                went = []
                for user in users:
                    before = counts(found)[1]
                    assert await as_user(site, user) == 200
                    went.append("new" if counts(found)[1] > before else "old")
                assert not first or went == first
                first = went
            assert 6 <= Counter(first)["new"] <= 32


async def test_a_canary_that_fails_its_callers_loses_them_to_the_others(front: Front) -> None:
    async with servers(good, broken) as found:
        pools = [pool(found[0], "old"), pool(found[1], "new", canary={"percent": 100, "by": "tenant"})]
        async with front(pools=pools) as site:
            await ready(site, 2)
            for _ in range(12):
                assert (await site.complete()).status_code == 200
            assert site.gateway.workers()[1]["set_aside"]
            # The breaker took it out of the way: after five faults nobody has to fail there first.
            assert counts(found)[1] <= 7


async def test_a_server_that_turns_requests_away_hands_them_to_its_fallback(front: Front) -> None:
    """gateway C11 with somewhere else to go: no caller sees the 429, and the fallback is used for nothing else."""
    async with servers(busy, good) as found:
        pools = [pool(found[0], "first"), pool(found[1], "spare", fallback=["overload"], fallback_after_s=60)]
        async with front(pools=pools) as site:
            await ready(site, 2)
            answers = await asyncio.gather(*(site.complete(stream=True) for _ in range(5)))
            assert [answer.status_code for answer in answers] == [200] * 5
            assert counts(found) == [5, 5]
    async with servers(good, good) as found:
        pools = [pool(found[0], "first"), pool(found[1], "spare", fallback=["overload", "context", "lost"])]
        async with front(pools=pools) as site:
            await ready(site, 2)
            for _ in range(5):
                assert (await site.complete()).status_code == 200
            assert counts(found) == [5, 0]


async def test_a_full_pool_overflows_into_its_fallback(front: Front) -> None:
    async with servers(slow, slow) as found:
        pools = [pool(found[0], "first", {"max_running": 2}), pool(found[1], "spare", fallback=["overload"])]
        async with front(pools=pools) as site:
            await ready(site, 2)
            answers = await asyncio.gather(*(site.complete() for _ in range(8)))
            assert {answer.status_code for answer in answers} == {200}
            assert counts(found)[0] >= 2
            assert counts(found)[1] >= 4


async def test_what_is_too_long_for_a_pool_goes_to_one_that_holds_it(front: Front) -> None:
    async with servers(good, good) as found:
        pools = [
            pool(found[0], "short", {"max_context": 100}),
            pool(found[1], "long", {"max_context": 4000}, fallback=["context"]),
        ]
        async with front(pools=pools) as site:
            await ready(site, 2)
            assert (await site.complete(prompt=[7] * 50)).status_code == 200
            assert (await site.complete(prompt=[7] * 500)).status_code == 200
            assert counts(found) == [1, 1]


async def test_a_server_that_finds_a_request_too_long_hands_it_on_too(front: Front) -> None:
    async def short(exchange: Exchange) -> None:
        await exchange.whole(b'{"error": {"code": "context_length_exceeded"}}', 400)

    async with servers(short, good) as found:
        pools = [pool(found[0], "short"), pool(found[1], "long", fallback=["context"])]
        async with front(pools=pools) as site:
            await ready(site, 2)
            assert (await site.complete()).status_code == 200
            assert counts(found) == [1, 1]


async def test_a_fallback_stands_in_for_a_pool_that_is_not_there(front: Front) -> None:
    async with servers(good, good) as found:
        gone = {
            **pool(found[0], "first"),
        }
        gone["launch"]["with"]["url"] = "http://127.0.0.1:9/v1"
        pools = [gone, pool(found[1], "spare", fallback=["lost"]), pool(found[0], "last", fallback=["lost"])]
        async with front(pools=pools, ready=False) as site:
            await until(lambda: len(site.dispatcher.workers) == 2, "the spares are there")
            for _ in range(4):
                assert (await site.complete()).status_code == 200
            assert counts(found) == [0, 4], "in their order"


async def test_a_failed_attempt_goes_to_another_server(front: Front) -> None:
    """gateway C5, E5: before the first byte, once, within the retry budget; not to the one that failed."""
    async with servers(broken, good) as found:
        pools = [pool(found[0], "a", weight=1), pool(found[1], "b", weight=1)]
        async with front(pools=pools) as site:
            await ready(site, 2)
            for _ in range(10):
                assert (await site.complete()).status_code == 200
            assert counts(found)[1] == 10


async def test_no_fallback_goes_outside_what_a_tenant_requires(front: Front) -> None:
    """Labels go first: the spare server has room, and is in the wrong place."""
    async with servers(busy, good) as found:
        pools = [
            pool(found[0], "eu", labels={"region": "eu"}),
            pool(found[1], "us", labels={"region": "us"}, fallback=["overload", "context", "lost"]),
        ]
        tenants = [
            {"id": "alpha", "requires": {"region": "eu"}, "privacy": {"allow_external": True}},
            {"id": "beta", "privacy": {"allow_external": True}},
        ]
        async with front(pools=pools, changes={"tenants": tenants}) as site:
            await ready(site, 2)
            answer = await site.complete("alpha")
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "9")
            assert counts(found) == [1, 0]
            assert (await site.complete("beta")).status_code == 200
            assert counts(found) == [2, 1]


async def test_a_frozen_server_holds_up_its_own_requests_only_c13(front: Front) -> None:
    """gateway C13: one of three hangs with open sockets. It gets its slots full and no more; everybody else is served
    meanwhile, and its own requests go elsewhere when their time to the first token is over."""
    async with servers(good, frozen, good) as found:
        settings = {"max_running": 4, "first_token_s": 6.0}
        pools = [pool(server, name, settings) for server, name in zip(found, "abc", strict=True)]
        async with front(pools=pools) as site:
            await ready(site, 3)
            tasks = [asyncio.create_task(site.complete()) for _ in range(60)]
            await until(lambda: sum(not task.done() for task in tasks) <= 5, "all but what the frozen one took")
            waiting = [task for task in tasks if not task.done()]
            assert counts(found)[1] <= 5
            assert waiting, "the others were served before its time was over"
            assert {task.result().status_code for task in tasks if task.done()} == {200}
            late = await asyncio.gather(*waiting)
            assert {answer.status_code for answer in late} == {200}
            await site.at_rest()


@pytest.mark.parametrize("streamed", [True, False])
async def test_when_all_turn_it_away_the_caller_hears_so(front: Front, streamed: bool) -> None:
    async with servers(busy, busy) as found:
        pools = [pool(found[0], "first"), pool(found[1], "spare", fallback=["overload"])]
        async with front(pools=pools) as site:
            await ready(site, 2)
            answer = await site.complete(stream=streamed)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "9")
            assert counts(found) == [1, 1]
            await site.at_rest()


async def test_calls_are_read_in_the_form_of_the_pool_that_answers(front: Front, tmp_path: Path) -> None:
    """The model's own workers speak Mistral's form and fail; its server's calls come as everybody's do."""

    async def calling(exchange: Exchange) -> None:
        await exchange.head()
        begun = {"index": 0, "id": "x", "type": "function", "function": {"name": "stay", "arguments": '{"for": '}}
        await exchange.event({"choices": [{"index": 0, "delta": {"content": "Well.", "tool_calls": None}}]})
        await exchange.event({"choices": [{"index": 0, "delta": {"tool_calls": [begun]}}]})
        more = {"index": 0, "function": {"arguments": '"[TOOL_CALLS]"}'}}
        await exchange.event(
            {"choices": [{"index": 0, "delta": {"tool_calls": [more]}, "finish_reason": "tool_calls"}]}
        )
        await exchange.event("[DONE]")
        exchange.close()

    tool = {"type": "function", "function": {"name": "stay", "parameters": {"type": "object"}}}
    source = tiny_tokenizer.write(tmp_path / "mistral", MISTRAL_LISTED, special=MISTRAL_TOKENS)
    (source / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    async with servers(calling) as (server,):
        pools = [{"name": "own", "launch": {"use": "echo", "count": 1}, "engine": {"blocks": 64}}]
        pools.append(pool(server, "far", fallback=["lost"]))
        models = [{"name": MODEL, "source": str(source), "pools": pools}]
        async with front(changes={"models": models}, echo=Echo(fail_with="internal", max_context=512)) as site:
            await ready(site, 2)
            client = site.client()
            tried = 0
            for streamed in (True, False) * 4:
                body: dict[str, Any] = {"messages": [{"role": "user", "content": "Stay?"}], "tools": [tool]}
                if streamed:
                    async with client.chat.completions.stream(model=MODEL, max_tokens=40, **body) as stream:
                        choice: Any = (await stream.get_final_completion()).choices[0]
                else:
                    choice = (await client.chat.completions.create(model=MODEL, max_tokens=40, **body)).choices[0]
                [call] = choice.message.tool_calls
                assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
                assert (call.function.name, call.function.arguments) == ("stay", '{"for": "[TOOL_CALLS]"}')
                assert call.id.startswith("call_")
                tried += 1
            assert len(server.requests) == tried
            assert await site.metric("forebay_route_decisions_total") > tried, "some were at its own worker first"
