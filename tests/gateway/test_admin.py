"""The admin API: who may ask, what it shows, swaps, purges with receipts."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from typing import Any

import httpx
import pytest

from gateway.http.admin import admin_routes
from gateway.policy_view import without_secrets
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, pool, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/admin/tenants"),
    ("GET", "/admin/policies"),
    ("POST", "/admin/policies"),
    ("GET", "/admin/queue"),
    ("GET", "/admin/workers"),
    ("DELETE", "/admin/tenants/alpha/cache"),
]


async def test_with_a_token_every_route_wants_it(start: Start) -> None:
    """security 35: every verb, every route, but the health check."""
    async with start(env={"FOREBAY_ADMIN_TOKEN": "a secret"}) as site:
        everything = [
            (method, re.sub(r"{.*?}", "x", route.path))
            for route in admin_routes(site.gateway)
            for method in sorted(route.methods or ())
            if route.path != "/healthz"
        ]
        assert len(everything) > 20
        for method, path in [*ROUTES, *everything]:
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "a secret"},
            ):
                answer = await site.admin.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, headers)
                assert method == "HEAD" or answer.json()["error"]["code"] == "invalid_token"
        for host in ("x/healthz?", "x/healthz#", "x\\healthz"):  # no name can make a route another one
            answer = await site.admin.get("/admin/tenants", headers={"host": host})
            assert answer.status_code in (400, 401), host
        bearer = {"authorization": "Bearer a secret"}
        assert (await site.admin.get("/admin/tenants", headers=bearer)).status_code == 200
        assert (await site.admin.get("/metrics", headers={**bearer, "origin": "http://x"})).status_code == 200
        assert (await site.admin.get("/healthz")).json()["ready"] is True


async def test_without_a_token_no_web_page_gets_in(shared: Site) -> None:
    """DESIGN §6: Origin and foreign Host are refused, on every route and verb; this machine may ask."""
    for method, path in ROUTES:
        for headers in (
            {"origin": "http://127.0.0.1"},
            {"host": "evil.example"},
            {"host": "127.0.0.1.evil.example"},
        ):
            answer = await shared.admin.request(method, path, headers=headers)
            assert answer.status_code == 403, (method, path, headers)
    for host in ("localhost:8081", "127.0.0.1", "[::1]:8081"):
        assert (await shared.admin.get("/metrics", headers={"host": host})).status_code == 200


async def test_unknown_routes_are_refused_in_our_shape(shared: Site) -> None:
    for method, path in (("GET", "/"), ("GET", "/v1/models"), ("PUT", "/admin/policies"), ("GET", "/admin/queue/")):
        answer = await shared.admin.request(method, path)
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_what_it_shows(start: Start) -> None:
    changes = {"tenants": [{"id": "alpha", "weight": 3, "limits": {"requests_per_minute": 10}}]}
    async with start(changes) as site:
        assert (await site.complete()).status_code == 200
        (tenant,) = (await site.admin.get("/admin/tenants")).json()["tenants"]
        assert (tenant["id"], tenant["weight"], tenant["limits"]["requests_per_minute"]) == ("alpha", 3.0, 10)
        assert tenant["remaining"]["requests"] == 9
        (worker,) = (await site.admin.get("/admin/workers")).json()["workers"]
        assert (worker["name"], worker["state"], worker["pid"] > 0) == ("echo/local-0", "ready", True)
        assert sum(worker["kv_blocks"].values()) == 256
        (model,) = (await site.admin.get("/admin/queue")).json()["models"]
        assert (model["model"], model["queued"]) == (MODEL, 0)
        text = (await site.admin.get("/metrics")).text
        assert 'forebay_requests_total{class="interactive",model="echo",outcome="ok",tenant="alpha"} 1.0' in text
        assert 'forebay_policy_seconds_count{policy="auth/jwt"} 1.0' in text
        assert 'forebay_worker_up{worker="echo/local-0"} 1.0' in text
        assert f'forebay_stalled{{model="{MODEL}"}} 0.0' in text
        policies = (await site.admin.get("/admin/policies")).json()
        assert policies["generation"] == 1
        assert policies["policies"]["auth"]["with"]["key_env"] == "FOREBAY_JWT_KEY"


async def test_secrets_of_a_policy_are_masked() -> None:
    shown = without_secrets({"keys": [{"hash": "abc", "tenant": "t"}], "token": "x", "key_env": "E", "input_cost": 1})
    assert "abc" not in json.dumps(shown)
    assert shown["token"] == "***"
    assert (shown["key_env"], shown["input_cost"]) == ("E", 1)


async def test_a_swap_through_the_api(start: Start) -> None:
    async with start() as site:
        answer = await site.admin.post(
            "/admin/policies", json={"scheduling": {"use": "vtc", "with": {"output_cost": 3}}}
        )
        assert answer.status_code == 200
        assert answer.json()["generation"] == 2
        assert answer.json()["policies"]["scheduling"] == {"use": "vtc", "with": {"output_cost": 3}}
        assert (await site.complete()).status_code == 200


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"scheduling": {"use": "vtx"}}, "vtc"),
        ({"scheduling": {"use": "vtc", "with": {"output_cots": 3}}}, "output_cots"),
        ({"sceduling": {"use": "vtc"}}, "sceduling"),
        ({"scheduling": "vtc"}, "scheduling"),
        ({"scheduling": {"use": "vtc", "wiht": {}}}, "wiht"),
        ({}, "kind"),
        ([], "object"),
        ({"reload": True}, "file"),
    ],
    ids=["name", "key", "kind", "shape", "use key", "empty", "list", "no file"],
)
async def test_a_swap_that_is_refused_says_why(shared: Site, body: Any, word: str) -> None:
    answer = await shared.admin.post("/admin/policies", json=body)
    assert answer.status_code in (400, 409)
    assert word in answer.json()["error"]["message"]
    assert (await shared.admin.get("/admin/policies")).json()["generation"] == 1


async def cached(site: Site, tenant: str, prompt: list[int]) -> int:
    answer = await site.complete(tenant, prompt=prompt, max_tokens=2)
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_purge_zeroes_one_tenants_cache_and_signs_for_it(start: Start) -> None:
    prompt = [5] * 64
    async with start(env={"FOREBAY_SERVER_SECRET": "0123456789abcdef"}) as site:
        for tenant in ("alpha", "beta"):
            await cached(site, tenant, prompt)
            assert await cached(site, tenant, prompt) > 0
        answer = await site.admin.delete("/admin/tenants/alpha/cache")
        assert answer.status_code == 200
        receipt = answer.json()
        assert (receipt["tenant"], receipt["epoch"], receipt["complete"]) == ("alpha", 1, True)
        assert receipt["zeroed_blocks"] >= 4
        signature = receipt.pop("signature")
        body = json.dumps(receipt, sort_keys=True, separators=(",", ":")).encode()
        assert signature == hmac.new(b"0123456789abcdef", body, hashlib.sha256).hexdigest()
        assert await cached(site, "alpha", prompt) == 0
        assert await cached(site, "beta", prompt) > 0
        assert (await site.admin.delete("/admin/tenants/nobody/cache")).status_code == 404


async def test_a_purge_while_blocks_are_in_use_is_202_and_complete_later(start: Start) -> None:
    """security 15: never a bare 200; the running stream goes on; what it held is zeroed when it ends."""
    async with start({"models": [pool(max_running=1)]}, echo=Echo(step_s=0.01)) as site:
        async with site.stream(prompt=[5] * 64, max_tokens=200) as response:
            lines = response.aiter_lines()
            await anext(lines)
            late = site.http.build_request(
                "POST",
                "/v1/completions",
                json={"model": MODEL, "prompt": [5] * 64, "max_tokens": 2},
                headers={"authorization": response.request.headers["authorization"]},
            )
            queued: asyncio.Task[httpx.Response] = asyncio.create_task(site.http.send(late))
            await until(lambda: site.gateway.parts.pipeline.active == 2, "one more under the old epoch")
            answer = await site.admin.delete("/admin/tenants/alpha/cache")
            assert answer.status_code == 202
            assert answer.json()["pending_blocks"] > 0
            assert not answer.json()["complete"]
            rest = [line async for line in lines]
            assert rest[-2] == "data: [DONE]"
        assert (await queued).status_code == 200
        await site.at_rest()
        handle = site.dispatcher.workers[0]
        await until(lambda: handle.stats.cached_blocks == 0, "also what ran on afterwards is swept")
        again = await site.admin.delete("/admin/tenants/alpha/cache")
        assert again.status_code == 200
        assert again.json()["complete"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("policies", b'{"\\ud800": {}}', "Send a JSON object"),
        ("policies", b'{"scheduling": {"use": "vtc", "with": {"input_cost": NaN}}}', "Send a JSON object"),
        ("policies", b'{"auth": {"use": "api_key", "with": {"keys": [{"tenat": "a"}]}}}', "did you mean 'tenant'?"),
        ("policies", b'{"scheduling": {"wiht": {}, "use": "vtc"}}', "there is no such key (known: use, with)"),
    ],
    ids=["half a character", "no number", "key inside a list", "key"],
)
async def test_malformed_bodies_are_told_what_to_write(shared: Site, path: str, body: bytes, said: str) -> None:
    answer = await shared.admin.post(f"/admin/{path}", content=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert shared.gateway.parts.runtime.current.generation == 1
