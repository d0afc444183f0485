"""``Idempotency-Key``: one run, one charge, the same bytes for whoever sends it again."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest

from gateway.errors import ApiError
from gateway.replays import ENTRY_BYTES, Key, Recording, Replays
from gateway.settings import Idempotency
from policies.types import TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Settlements, Site, pool, token, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = ECHO = Echo(step_s=0.02)
"""``ECHO``: for the tests that share a gateway, each with keys of its own."""
KEYED = {"idempotency-key": "order-17"}


def bearer(tenant: str = "alpha", **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token(tenant)}", **more}


async def post(site: Site, tenant: str = "alpha", key: str = "order-17", **body: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 8, **body}
    return await site.http.post("/v1/completions", json=body, headers=bearer(tenant, **{"idempotency-key": key}))


async def test_fifty_at_once_run_once_and_are_charged_once(shared: Site) -> None:
    """security 75, in one process."""
    settled = Settlements(shared)
    answers = await asyncio.gather(*(post(shared, key="fifty") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert sum("x-forebay-replayed" in answer.headers for answer in answers) == 49
    assert len({answer.headers["x-request-id"] for answer in answers}) == 50
    assert [usage.output for usage in settled.usages] == [8]
    later = await post(shared, key="fifty")
    assert later.content == answers[0].content
    assert len(settled.usages) == 1
    settled.close()
    await shared.at_rest()


async def test_streams_are_joined_while_they_run_and_replayed_afterwards(shared: Site) -> None:
    settled = Settlements(shared)
    body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 12, "stream": True}
    headers = bearer(**{"idempotency-key": "joined"})

    async def read() -> bytes:
        async with shared.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            return b"".join([piece async for piece in response.aiter_raw()])

    first = asyncio.create_task(read())
    await until(lambda: shared.dispatcher.in_flight, "it runs")
    joined, whole = await asyncio.gather(read(), first)
    assert joined == whole == await read()
    assert whole.endswith(b"data: [DONE]\n\n")
    settled.close()
    assert [usage.output for usage in settled.usages] == [12]


async def test_who_loses_the_connection_finds_the_request_running(shared: Site) -> None:
    settled = Settlements(shared)
    with pytest.raises(httpx.ReadTimeout):
        await shared.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": [5, 6], "max_tokens": 50},
            headers=bearer(**{"idempotency-key": "lost"}),
            timeout=httpx.Timeout(30, read=0.3),
        )
    answer = await post(shared, key="lost", prompt=[5, 6], max_tokens=50)
    settled.close()
    assert answer.headers["x-forebay-replayed"] == "true"
    assert answer.json()["usage"]["completion_tokens"] == 50
    assert [usage.output for usage in settled.usages] == [50]


async def test_a_caller_that_does_not_read_holds_up_nobody_who_comes_for_its_answer(start: Start) -> None:
    """Its connection may have broken without a word, which is when clients send again: the other one gets all of it."""
    settings = {
        "streams": {"slow_reader_s": 0.5},
        "idempotency": {"max_bytes_per_tenant": 2**26, "max_bytes": 2**27},
        "models": [pool(max_running=16, blocks=8192)],
    }
    body = {"model": MODEL, "prompt": list(range(5, 45)), "max_tokens": 1500, "n": 16, "stream": True, "logprobs": 1}
    async with start(settings, echo=Echo(step_s=0.001)) as site:
        settled = Settlements(site)
        data = json.dumps(body).encode()
        lines = [f"{name}: {value}" for name, value in {**bearer(**KEYED), "content-length": str(len(data))}.items()]
        head = "\r\n".join(["POST /v1/completions HTTP/1.1", "host: x", *lines, "", ""]).encode()
        host, port = site.url.removeprefix("http://").split(":")
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(silent, (host, int(port)))
            await loop.sock_sendall(silent, head + data)
            await until(lambda: site.dispatcher.in_flight, "it runs")
            again = await site.http.post("/v1/completions", content=data, headers=bearer(**KEYED), timeout=120)
        assert again.headers["x-forebay-replayed"] == "true"
        assert again.text.endswith("data: [DONE]\n\n")
        assert [usage.output for usage in settled.usages] == [16 * 1500]
        settled.close()
        await site.at_rest()


async def test_a_request_that_nobody_asks_for_again_is_cancelled(start: Start) -> None:
    """It would run for nobody; the key is free again, since there is no answer under it."""
    async with start({"idempotency": {"linger_s": 0.2}}, echo=SLOW) as site:
        with pytest.raises(httpx.ReadTimeout):
            await site.http.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": [5, 6], "max_tokens": 400},
                headers=bearer(**KEYED),
                timeout=httpx.Timeout(30, read=0.2),
            )
        await site.at_rest()
        answer = await post(site)
        assert answer.status_code == 200
        assert "x-forebay-replayed" not in answer.headers


async def test_another_body_under_the_same_key_is_422(shared: Site) -> None:
    assert (await post(shared, key="other")).status_code == 200
    other = await post(shared, key="other", max_tokens=9)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert other.json()["error"]["param"] == "Idempotency-Key"


async def test_keys_belong_to_a_tenant_a_user_and_a_route(shared: Site) -> None:
    await post(shared, key="mine")
    assert "x-forebay-replayed" not in (await post(shared, "beta", key="mine")).headers
    mine = {"idempotency-key": "mine"}
    as_ann = {"authorization": f"Bearer {token('alpha', sub='ann')}", **mine}
    body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 8}
    assert "x-forebay-replayed" not in (await shared.http.post("/v1/completions", json=body, headers=as_ann)).headers
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    on_chat = await shared.http.post("/v1/chat/completions", json=chat, headers=bearer(**mine))
    assert on_chat.status_code == 200


async def test_a_failure_is_not_replayed(start: Start) -> None:
    """Neither a refusal nor a fault: the next attempt may well succeed."""
    settings = {"tenants": [{"id": "alpha", "limits": {"concurrent": 1}}], "models": [pool(max_running=1)]}
    async with start(settings, echo=SLOW) as site:
        holder = asyncio.create_task(post(site, key="holder", max_tokens=50))
        await until(lambda: site.dispatcher.in_flight, "it runs")
        refused = await post(site)
        assert refused.status_code == 429
        await holder
        again = await post(site)
        assert again.status_code == 200
        assert "x-forebay-replayed" not in again.headers
    async with start(echo=Echo(fail_with="internal")) as site:
        assert (await post(site)).status_code == 500
        assert len(site.gateway.parts.pipeline.replays) == 0


async def test_a_purge_forgets_answers(start: Start) -> None:
    async with start() as site:
        await post(site)
        assert len(site.gateway.parts.pipeline.replays) == 1
        assert (await site.admin.delete("/admin/tenants/alpha/cache")).status_code == 200
        assert len(site.gateway.parts.pipeline.replays) == 0
        assert "x-forebay-replayed" not in (await post(site)).headers


async def test_answers_are_forgotten_in_time(start: Start) -> None:
    async with start({"idempotency": {"keep_s": 0.1}}) as site:
        await post(site)
        await until(lambda: not len(site.gateway.parts.pipeline.replays), "it is forgotten")
        assert site.gateway.parts.pipeline.replays.bytes == 0


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "é"])
async def test_a_key_must_be_sane(shared: Site, key: str) -> None:
    headers = [(b"authorization", f"Bearer {token('alpha')}".encode()), (b"idempotency-key", key.encode("latin-1"))]
    body = json.dumps({"model": MODEL, "prompt": [5], "max_tokens": 1})
    answer = await shared.http.post("/v1/completions", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_the_official_client_sends_one(shared: Site) -> None:
    client: openai.AsyncOpenAI = shared.client()
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": [5, 6],
        "max_tokens": 3,
        "extra_headers": {"idempotency-key": "client"},
    }
    assert (await client.completions.create(**asked)).id == (await client.completions.create(**asked)).id


# -- bounds ------------------------------------------------------------------------------------------------------------


def key(tenant: str, number: int) -> Key:
    return Key(TenantId(tenant), None, 0, "/v1/completions", str(number))


def finished(replays: Replays, name: Key, size: int) -> Recording:
    recording, new = replays.claim(name, b"digest")
    assert new
    replays.record(recording, {"type": "http.response.start", "status": 200, "headers": []})
    replays.record(recording, {"type": "http.response.body", "body": b"x" * size})
    replays.close(recording, good=True)
    return recording


async def test_a_tenant_pushes_out_its_own_oldest_answers_only() -> None:
    replays = Replays(Idempotency(max_bytes_per_tenant=100_000, max_bytes=1_000_000))
    finished(replays, key("other", 0), 50_000)
    for number in range(100):
        finished(replays, key("greedy", number), 20_000)
    assert replays.bytes <= 50_000 + 2 * ENTRY_BYTES + 100_000
    assert not replays.claim(key("other", 0), b"digest")[1]
    assert not replays.claim(key("greedy", 99), b"digest")[1]
    assert replays.claim(key("greedy", 0), b"digest")[1]
    replays.forget(TenantId("greedy"))
    replays.forget(TenantId("other"))


async def test_all_together_are_bounded_too() -> None:
    """Who has most gives way."""
    replays = Replays(Idempotency(max_bytes_per_tenant=100_000, max_bytes=200_000))
    finished(replays, key("modest", 0), 1000)
    for number in range(50):
        for part in range(3):
            finished(replays, key(f"tenant-{number}", part), 25_000)
            assert replays.bytes <= 200_000
    assert not replays.claim(key("modest", 0), b"digest")[1]
    for tenant in ("modest", *(f"tenant-{number}" for number in range(50))):
        replays.forget(TenantId(tenant))
    assert (replays.bytes, len(replays), replays._shelves) == (0, 0, {})


async def test_an_answer_that_is_too_large_is_not_kept_but_its_key_is() -> None:
    replays = Replays(Idempotency(max_bytes_per_tenant=100_000, max_bytes=1_000_000))
    large = finished(replays, key("alpha", 1), 200_000)
    assert large.lost
    assert replays.bytes == ENTRY_BYTES
    with pytest.raises(ApiError) as refused:
        replays.claim(key("alpha", 1), b"digest")
    assert refused.value.status == 409
    replays.forget(TenantId("alpha"))


async def test_who_follows_what_breaks_off_is_told() -> None:
    replays = Replays(Idempotency())
    recording, _ = replays.claim(key("alpha", 1), b"digest")

    async def follow() -> list[bytes]:
        return [piece async for piece in recording.follow()]

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    replays.record(recording, {"type": "http.response.start", "status": 200, "headers": []})
    replays.record(recording, {"type": "http.response.body", "body": b"half", "more_body": True})
    await asyncio.sleep(0)
    replays.close(recording, good=False)
    with pytest.raises(ApiError) as broken:
        await following
    assert broken.value.status == 503
    assert replays.bytes == 0
    assert replays.claim(key("alpha", 1), b"digest")[1]
