"""A real second Forebay as the upstream: queued, charged and traced like a worker of our own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Settlements, running, token, until
from tests.plugins.openai_upstream.conftest import Front, plugin, upstream
from tests.plugins.openai_upstream.scripted import Exchange, event, scripted, stream
from workers.testing import Echo


async def test_the_official_client_is_served_by_another_forebay(front: Front, tmp_path: Path) -> None:
    """Chats and completions, streamed or not, with the figures of the server that ran them."""
    async with running(tmp_path / "behind") as behind:
        settings: dict[str, Any] = {"api_key_env": "UPSTREAM_KEY", "env": {"UPSTREAM_KEY": token("beta")}}
        async with front(f"{behind.url}/v1", **settings) as site:
            client = site.client()
            text = await client.completions.create(model=MODEL, prompt=[40, 41, 42], max_tokens=6)
            own = await behind.client("alpha").completions.create(model=MODEL, prompt=[40, 41, 42], max_tokens=6)
            assert text.choices[0].text == own.choices[0].text
            assert text.usage == own.usage
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
            answer = await client.chat.completions.create(**chat, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
            expected = await behind.client().chat.completions.create(**chat, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
            assert answer.choices[0].message.content == expected.choices[0].message.content
            assert answer.usage.completion_tokens == 12
            pieces = await client.chat.completions.create(
                **chat, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
            )  # type: ignore[call-overload]
            chunks = [chunk async for chunk in pieces]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
                expected.choices[0].message.content
            )
            assert chunks[-1].usage.completion_tokens == 12
            await site.at_rest()
        await behind.at_rest()


async def test_choices_and_log_probabilities_come_through(front: Front, tmp_path: Path) -> None:
    async with running(tmp_path / "behind", echo=Echo(shift=1)) as behind:
        settings: dict[str, Any] = {"api_key_env": "UPSTREAM_KEY", "env": {"UPSTREAM_KEY": token("beta")}}
        body = {"prompt": [70, 71, 72, 73], "max_tokens": 4, "n": 3, "logprobs": 1}
        async with front(f"{behind.url}/v1", **settings) as site:
            ours, theirs = (await site.complete(**body)).json(), (await behind.complete(**body)).json()
            assert ours["choices"] == theirs["choices"]
            assert ours["usage"] == theirs["usage"]
            await site.at_rest()


async def test_leaving_reaches_the_worker_two_gateways_away_c1(front: Front, tmp_path: Path) -> None:
    """gateway C1: the blocks of the engine behind are free again within half a second, and what ran is paid twice over:
    by the tenant here, and by the tenant that we are there."""
    async with running(tmp_path / "behind", echo=Echo(step_s=0.01)) as behind:
        settings: dict[str, Any] = {"api_key_env": "UPSTREAM_KEY", "env": {"UPSTREAM_KEY": token("beta")}}
        async with front(f"{behind.url}/v1", **settings) as site:
            here, there = Settlements(site), Settlements(behind)
            async with site.stream(max_tokens=2000) as response:
                async for line in response.aiter_lines():
                    if line:
                        break
            [handle] = behind.dispatcher.workers
            await until(lambda: handle.stats.used_blocks == 0 and not behind.dispatcher.in_flight, "free again")
            await site.at_rest()
            await behind.at_rest()
            [ours], [theirs] = here.usages, there.usages
            assert 1 <= ours.output <= theirs.output < 200
            assert ours.prompt == theirs.prompt == 4
            here.close()
            there.close()


async def test_max_running_gates_and_the_rest_waits_here_in_order(front: Front) -> None:
    """A prompt of many tokens takes no place from others: an upstream has no step that it would have to wait for."""
    running_now = most = 0

    async def script(exchange: Exchange) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await until(lambda: most >= 4, "as many as may run are there")
        await asyncio.sleep(0.02)
        running_now -= 1
        await exchange.whole(stream("ok"))

    async with scripted(script) as server, front(server.url, max_running=4) as site:
        answers = await asyncio.gather(*(site.complete(prompt=[7] * 3000, max_tokens=2) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        # One more than max_running: the gate keeps one job at the worker's door.
        assert 4 <= most <= 5


async def test_nothing_of_the_caller_but_what_it_asked_goes_out_d5(front: Front) -> None:
    """gateway D5: no credential, cookie, forwarded or hop-by-hop header; the body is what was read and checked."""

    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream("ok"))

    secrets = {
        "x-api-key": "caller-secret-1",
        "api-key": "caller-secret-2",
        "cookie": "session=caller-secret-3",
        "x-goog-api-key": "caller-secret-4",
        "proxy-authorization": "Basic caller-secret-5",
        "x-forwarded-for": "192.0.2.77",
        "x-forebay-class": "batch",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "te": "trailers",
        "user-agent": "caller-secret-6",
    }
    settings: dict[str, Any] = {
        "api_key_env": "UPSTREAM_KEY",
        "env": {"UPSTREAM_KEY": "our-own-key"},
        "headers": {"OpenAI-Organization": "us"},
        "model": "their-name",
        "extra_body": {"store": False},
    }
    async with scripted(script) as server, front(server.url, **settings) as site:
        body = {"user": "caller-secret-7", "cache_salt": "caller-secret-8", "tenant": "beta", "made_up": 1}
        assert (await site.complete(headers=secrets, metadata={"k": "caller-secret-9"}, **body)).status_code == 200
        [request] = server.requests
        assert request.headers == {
            "host": f"127.0.0.1:{server.port}",
            "authorization": "Bearer our-own-key",
            "openai-organization": "us",
            "content-type": "application/json",
            "content-length": request.headers["content-length"],
            "accept": "text/event-stream, application/json",
            "accept-encoding": "identity",
        }
        assert request.body == {
            "model": "their-name",
            "prompt": [5, 6, 7, 8],
            "max_tokens": 8,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "store": False,
        }


async def test_every_parameter_arrives_under_its_name(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}))

    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "stop": ["a", "b"],
        "logit_bias": {"5": -100},
        "min_tokens": 1,
    }
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi ☕"}]
    async with scripted(script) as server, front(server.url, max_tokens_field="max_completion_tokens") as site:
        headers = {"authorization": f"Bearer {token('alpha')}"}
        body = {"model": MODEL, "messages": messages, "max_tokens": 9, "logprobs": True, "top_logprobs": 2, **asked}
        answer = await site.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.json()["choices"][0]["message"]["content"] == "x"
        [request] = server.requests
        expected = {**asked, "messages": messages, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}
        assert request.body == {
            **expected,
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def test_the_cache_salt_is_the_callers_scope_and_nothing_it_chose(front: Front) -> None:
    """security 5, 7, at a server with a cache of its own: equal within a tenant, not across, and new after a purge."""

    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream("ok"))

    async with scripted(script) as server, front(server.url, cache_salt=True) as site:
        before = await site.admin.delete("/admin/tenants/beta/cache?user=nobody")
        assert (before.status_code, before.json()["widened"]) == (200, False), "nothing of it was ever sent there"
        for caller in ("alpha", "alpha", "beta"):
            await site.complete(caller, cache_salt="chosen-by-the-caller")
        receipt = await site.admin.delete("/admin/tenants/alpha/cache")
        await site.complete("alpha")
        one, two, other, later = (request.body["cache_salt"] for request in server.requests)
        assert one == two
        assert len({one, other, later}) == 3
        assert "chosen" not in one
        # What it cached under the old salt cannot be zeroed from here, and the receipt does not pretend.
        assert receipt.status_code == 202
        assert receipt.json()["failed"] == {"echo/far-0": "upstream"}
        assert receipt.json()["complete"] is False


async def test_a_text_model_counts_by_estimate_until_it_is_told(front: Front) -> None:
    """Without a tokenizer here: quota is reserved by bytes, and settled by the upstream's own count."""

    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream("ok"))

    async with scripted(script) as server, front(server.url, usage=False) as site:
        settled = Settlements(site)
        assert (await site.complete(prompt="x" * 400)).json()["usage"]["prompt_tokens"] == 100
        assert "stream_options" not in server.requests[0].body
        assert server.requests[0].body["prompt"] == "x" * 400
        assert [usage.prompt for usage in settled.usages] == [100]
        settled.close()


async def test_it_stands_beside_workers_of_our_own_in_one_model(front: Front) -> None:
    """A pool of ours and an upstream: one queue, and each request runs on one of them."""

    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(0.02)
        await exchange.whole(stream("from afar"))

    local = {"name": "local", "launch": {"use": "echo"}, "engine": {"blocks": 256, "max_running": 1}}
    async with scripted(script) as server:
        pools = [local, upstream(server.url, max_running=2)]
        changes = {"models": [{"name": MODEL, "source": "model", "pools": pools}]}
        async with front(changes=changes, echo=Echo(step_s=0.01)) as site:
            await until(lambda: len(site.dispatcher.workers) == 2, "both are there")
            asked = [site.complete(max_tokens=8, ignore_eos=True) for _ in range(12)]
            texts = [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*asked)]
            assert len(set(texts)) == 2
            assert "from afar" in texts
            assert site.dispatcher.model.revision == "echo"  # prefix keys are those of the engine
            await site.at_rest()


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"echo": True, "logprobs": 1}, "echo"), ({"use_beam_search": True, "n": 2}, "use_beam_search")],
    ids=["echo", "beams"],
)
async def test_what_no_upstream_can_be_asked_runs_on_our_own_or_is_refused(
    front: Front, asked: dict[str, Any], param: str
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream("from afar"))

    local = {"name": "local", "launch": {"use": "echo"}, "engine": {"blocks": 256, "max_running": 2}}
    async with scripted(script) as server:
        changes = {"models": [{"name": MODEL, "source": "model", "pools": [local, upstream(server.url)]}]}
        async with front(changes=changes) as site:
            await until(lambda: len(site.dispatcher.workers) == 2, "both are there")
            answers = await asyncio.gather(*(site.complete(max_tokens=4, **asked) for _ in range(6)))
            assert [answer.status_code for answer in answers] == [200] * 6
            assert server.requests == []
    async with scripted(script) as server, front(server.url) as site:
        refused = await site.complete(**asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert server.requests == []


async def test_its_pool_is_external_unless_a_label_says_otherwise(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream("ok"))

    async with scripted(script) as server:
        near = {**upstream(server.url, "near"), "labels": {"external": "false", "rack": "7"}}
        async with front(pools=[upstream(server.url), near]) as site:
            labels = {worker["pool"]: worker["labels"] for worker in site.gateway.workers()}
            assert labels == {"far": {"external": "true"}, "near": {"external": "false", "rack": "7"}}


def test_what_is_registered() -> None:
    [spec] = plugin.forebay_launchers()
    assert (spec.name, spec.upstream) == ("openai_upstream", True)


@pytest.mark.parametrize("wrong", ["", "two words", "naïve"])
async def test_a_key_that_is_none_stops_the_start(front: Front, wrong: str) -> None:
    with pytest.raises(ValueError, match="UPSTREAM_KEY"):
        async with front("http://127.0.0.1:9/v1", api_key_env="UPSTREAM_KEY", env={"UPSTREAM_KEY": wrong}):
            pass


async def test_a_response_format_is_handed_on_as_it_was_asked(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream("{}"))

    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}, "strict": True}}
    async with scripted(script) as server, front(server.url) as site:
        assert (await site.complete(response_format=form)).status_code == 200
        [request] = server.requests
        assert request.body["response_format"] == form


def call(index: int, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"index": index, "function": function, **({"id": f"theirs{index}", "type": "function"} if name else {})}


async def test_tools_go_out_and_calls_come_back(front: Front) -> None:
    """Asked in the API's words; streamed calls reach our caller as calls, also when it collects them."""

    async def script(exchange: Exchange) -> None:
        deltas = [
            {"role": "assistant", "content": "Wait."},
            {"tool_calls": [call(0, "look")]},
            {"tool_calls": [call(0, arguments='{"a": ')]},
            {"tool_calls": [call(0, arguments='"}"}')]},
            {"tool_calls": [call(1, "stay", "{}")]},
        ]
        events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        lines = [json.dumps(said) for said in events]
        await exchange.whole("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())

    tools: Any = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "stay")]
    given: Any = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [given]},
        {"role": "tool", "content": "seen", "tool_call_id": "c"},
    ]
    async with scripted(script) as server, front(server.url) as site:
        client = site.client()
        arguments: Any = {"model": "echo", "messages": messages, "tools": tools, "tool_choice": "required"}
        whole = (await client.chat.completions.create(**arguments)).choices[0]
        assert server.requests[0].body["messages"] == messages
        assert [tool["function"]["name"] for tool in server.requests[0].body["tools"]] == ["look", "stay"]
        assert server.requests[0].body["tool_choice"] == "required"
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "Wait."
        calls = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls or []]  # type: ignore[union-attr]
        assert calls == [("look", '{"a": "}"}'), ("stay", "{}")]
        stream = await client.chat.completions.create(**arguments, stream=True)
        fragments = [
            (piece.index, piece.function.arguments or "")
            async for chunk in stream
            for choice in chunk.choices
            for piece in choice.delta.tool_calls or []
            if piece.function is not None
        ]
        for index, (_, expected) in enumerate(calls):
            assert "".join(text for place, text in fragments if place == index) == expected
        await client.close()


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def called(*calls: dict[str, Any], finish: str | None = None, content: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content, "tool_calls": [*calls]}, "finish_reason": finish}]}


@pytest.mark.parametrize("streamed", [True, False])
async def test_calls_of_tools_come_through_in_both_directions(front: Front, streamed: bool) -> None:
    """The server's calls, in fragments and several at once, are what the official client gets; one takes nothing."""

    async def script(exchange: Exchange) -> None:
        assert exchange.body["tools"] == [TOOL]
        await exchange.head()
        await exchange.event(called(content="Let me see."))
        name = {"index": 0, "id": "a", "type": "function", "function": {"name": "weather", "arguments": ""}}
        await exchange.event(called(name))
        for part in ('{"city": "Os', 'lo"}'):
            await exchange.event(called({"index": 0, "function": {"arguments": part}}))
        await exchange.event(called({"index": 1, "id": "b", "function": {"name": "weather", "arguments": ""}}))
        await exchange.event(called(finish="tool_calls"))
        await exchange.event("[DONE]")
        exchange.close()

    async with scripted(script) as server, front(server.url) as site:
        earlier = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        messages: list[Any] = [
            {"role": "user", "content": "and in Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [earlier]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [TOOL], "max_tokens": 50}
        if streamed:
            content, found = "", {}
            async for chunk in await site.client().chat.completions.create(stream=True, **asked):
                [choice] = chunk.choices
                content += choice.delta.content or ""
                for piece in choice.delta.tool_calls or ():
                    assert piece.function is not None
                    old = found.get(piece.index, ("", ""))
                    found[piece.index] = old[0] + (piece.function.name or ""), old[1] + (piece.function.arguments or "")
            calls, finish = list(found.values()), choice.finish_reason
        else:
            answer = (await site.client().chat.completions.create(**asked)).choices[0]
            content, finish = answer.message.content or "", answer.finish_reason
            calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
        assert (content, finish) == ("Let me see.", "tool_calls")
        assert calls == [("weather", '{"city": "Oslo"}'), ("weather", "{}")]
        assert server.requests[0].body["messages"][1]["tool_calls"] == [earlier]
        assert server.requests[0].body["messages"][2]["tool_call_id"] == "call_1"


async def test_embeddings_pass_through_to_the_pools_that_have_them(front: Front) -> None:
    """Vectors come as they were written, the tenant is charged for what the server counted; no text goes there."""

    async def vectors(exchange: Exchange) -> None:
        assert exchange.path == "/v1/embeddings"
        assert "stream" not in exchange.body
        data = [{"object": "embedding", "index": i, "embedding": [0.5, -1.25e-7]} for i in range(2)]
        figures = {"prompt_tokens": 9, "total_tokens": 9}
        await exchange.whole(json.dumps({"object": "list", "data": data, "model": "x", "usage": figures}).encode())

    async def texts(exchange: Exchange) -> None:
        assert exchange.path == "/v1/completions"
        await exchange.whole(stream("ok"))

    async with scripted(vectors) as server, scripted(texts) as other:
        pools = [upstream(server.url, "vectors", endpoints=["embeddings"]), upstream(other.url, "texts")]
        async with front(pools=pools) as site:
            await until(lambda: len(site.dispatcher.workers) == 2, "both are there")
            settled = Settlements(site)
            for _ in range(4):
                made = await site.client().embeddings.create(
                    model=MODEL, input=["one", "two"], encoding_format="float", dimensions=2
                )
                assert [entry.embedding for entry in made.data] == [[0.5, -1.25e-7]] * 2
                assert (made.model, made.usage.prompt_tokens, made.usage.total_tokens) == (MODEL, 9, 9)
                assert (await site.complete()).status_code == 200
            assert [(usage.prompt, usage.output) for usage in settled.usages if usage.prompt == 9] == [(9, 0)] * 4
            assert server.requests[0].body == {"model": MODEL, "input": ["one", "two"], "dimensions": 2}
            assert (len(server.requests), len(other.requests)) == (4, 4)
            settled.close()
            await site.at_rest()


async def test_a_failure_to_embed_is_told_as_one(front: Front) -> None:
    async def broken(exchange: Exchange) -> None:
        await exchange.whole(b'{"object": "list"}')

    async with scripted(broken) as server, front(server.url, endpoints=["embeddings"]) as site:
        headers = {"authorization": f"Bearer {token('alpha')}"}
        answer = await site.http.post("/v1/embeddings", json={"model": MODEL, "input": "x"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
        await site.at_rest()
