"""Keys and tenants over the admin API of a running gateway: live, durable, audited."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.compose import BuildError
from gateway.state import audit
from tests.gateway.conftest import Start
from tests.gateway.harness import AUTH, BASE, MODEL, Site, merged, running, token, until
from workers.testing import Echo

CHAIN = {"use": "chain", "with": {"policies": [AUTH, {"use": "api_key"}]}}
KEPT: dict[str, Any] = {"state": {"path": "state"}, "policies": {"auth": CHAIN}}


async def ask(site: Site, secret: str, **body: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2, **body}
    return await site.http.post("/v1/completions", json=body, headers={"x-api-key": secret})


async def made(site: Site, **fields: Any) -> dict[str, Any]:
    answer = await site.admin.post("/admin/keys", json={"tenant": "alpha", **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    body: dict[str, Any] = answer.json()
    return body


async def until_refused(site: Site, secret: str) -> None:
    """Wait until it is."""
    async with asyncio.timeout(30):
        while (await ask(site, secret)).status_code != 401:
            await asyncio.sleep(0.05)


async def test_a_key_lives_from_its_making_to_its_revocation(start: Start, tmp_path: Path) -> None:
    """The secret is shown once; on the disk and in every other answer there is nothing of it but its beginning."""
    async with start(KEPT) as site:
        key = await made(site, user="ann", groups=["g"], name="laptop", expires_in_s=3600)
        secret = key["secret"]
        assert (await ask(site, secret)).status_code == 200
        listed = (await site.admin.get("/admin/keys?tenant=alpha")).json()["keys"]
        assert [item["id"] for item in listed] == [key["id"]]
        assert secret.startswith(listed[0]["secrets"][0]["prefix"])
        assert (await site.admin.get("/admin/keys?tenant=beta")).json() == {"keys": []}
        one = await site.admin.get(f"/admin/keys/{key['id']}")
        assert one.json() == listed[0]
        assert (await site.admin.delete(f"/admin/keys/{key['id']}")).json()["state"] == "revoked"
        assert (await ask(site, secret)).status_code == 401
        assert (await site.admin.delete(f"/admin/keys/{key['id']}")).status_code == 200
        shown = [one.text, (await site.admin.get("/admin/audit")).text, (await site.admin.get("/admin/keys")).text]
        assert not any(secret in text for text in shown)
        assert not any(secret.encode() in file.read_bytes() for file in (tmp_path / "state").iterdir())


async def test_a_key_in_use_ends_with_the_next_request_its_stream_is_finished(start: Start) -> None:
    """security 33: the stream goes on, as documented; the next request, on the same connection too, gets 401."""
    async with start(KEPT) as site, httpx.AsyncClient(base_url=site.url, timeout=30) as client:
        key = await made(site)
        headers = {"x-api-key": key["secret"]}
        body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = response.aiter_lines()
            await anext(lines)
            assert (await site.admin.delete(f"/admin/keys/{key['id']}")).status_code == 200
            assert (await ask(site, key["secret"])).status_code == 401
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_rotation_overlaps_and_keeps_quotas(start: Start) -> None:
    """Rotating a credential does not reset a budget: the tenant's minute goes on counting."""
    tenants = [{"id": "alpha", "limits": {"requests_per_minute": 3}}]
    async with start({**KEPT, "tenants": tenants}) as site:
        key = await made(site)
        assert (await ask(site, key["secret"])).headers["x-ratelimit-remaining-requests"] == "2"
        rotated = (await site.admin.post(f"/admin/keys/{key['id']}/rotate", json={"overlap_s": 2})).json()
        assert rotated["id"] == key["id"]
        assert rotated["secret"] != key["secret"]
        assert (await ask(site, key["secret"])).status_code == 200
        assert (await ask(site, rotated["secret"])).headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(site, rotated["secret"])).status_code == 429
        await until_refused(site, key["secret"])
        again = (await site.admin.post(f"/admin/keys/{key['id']}/rotate", json={"overlap_s": 0})).json()
        assert (await ask(site, rotated["secret"])).status_code == 401
        assert (await ask(site, again["secret"])).status_code == 429
        assert len(again["secrets"]) == 1


async def test_a_key_ends_when_it_expires(start: Start) -> None:
    async with start(KEPT) as site:
        key = await made(site, expires_in_s=2)
        assert (await ask(site, key["secret"])).status_code == 200
        await until_refused(site, key["secret"])
        assert (await site.admin.get(f"/admin/keys/{key['id']}")).json()["state"] == "expired"
        refused = await site.admin.post(f"/admin/keys/{key['id']}/rotate")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "key_expired")


async def test_another_gateway_of_the_same_folder_hears_of_a_revocation(tmp_path: Path) -> None:
    async with running(tmp_path, KEPT) as one, running(tmp_path, KEPT) as two:
        key = await made(one)
        began = time.monotonic()
        while (await ask(two, key["secret"])).status_code != 200:
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.1)
        assert (await one.admin.delete(f"/admin/keys/{key['id']}")).status_code == 200
        began = time.monotonic()
        while (await ask(two, key["secret"])).status_code != 401:
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.1)


async def test_keys_and_tenants_outlive_the_process_and_the_log_is_whole(tmp_path: Path) -> None:
    async with running(tmp_path, KEPT) as site:
        created = await site.admin.post(
            "/admin/tenants", json={"id": "gamma", "weight": 3, "limits": {"concurrent": 2}}
        )
        assert created.status_code == 201, created.text
        key = await made(site, tenant="gamma")
        assert (await site.admin.patch("/admin/tenants/gamma", json={"weight": 5})).json()["weight"] == 5
    async with running(tmp_path, KEPT) as site:
        assert (await ask(site, key["secret"])).status_code == 200
        tenants = {tenant["id"]: tenant for tenant in (await site.admin.get("/admin/tenants")).json()["tenants"]}
        assert (tenants["gamma"]["weight"], tenants["gamma"]["limits"]["concurrent"]) == (5, 2)
        entries = (await site.admin.get("/admin/audit")).json()["entries"]
    assert [entry["action"] for entry in entries] == ["tenant.update", "key.create", "tenant.create"]
    assert (entries[0]["before"]["weight"], entries[0]["after"]["weight"]) == (3, 5)
    assert entries[0]["actor"] == {"name": "local", "via": "api", "peer": "127.0.0.1"}
    log = tmp_path / "state" / audit.LOG_FILE
    assert audit.verify(log, audit.find_key(log.parent, {})).ok


async def test_changes_of_a_tenant_are_live_and_the_file_is_the_truth(start: Start) -> None:
    async with start({**KEPT, "tenants": [{"id": "alpha", "weight": 2}, {"id": "beta"}]}) as site:
        assert (await site.complete()).status_code == 200
        answer = await site.admin.patch("/admin/tenants/alpha", json={"limits": {"requests_per_minute": 1}})
        assert answer.status_code == 200
        assert (answer.json()["in_file"], answer.json()["set_in_file"]) == (True, ["weight"])
        assert (await site.complete()).status_code == 200
        assert (await site.complete()).status_code == 429
        refused = await site.admin.patch("/admin/tenants/alpha", json={"weight": 9, "class": "batch"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "weight")
        assert "configuration file sets weight" in refused.json()["error"]["message"]
        assert (await site.admin.get("/admin/tenants/alpha")).json()["class"] == "interactive"
        assert (await site.admin.patch("/admin/tenants/alpha", json={"limits": None})).status_code == 200
        assert (await site.complete()).status_code == 200
        assert (await site.admin.delete("/admin/tenants/alpha")).json()["in_file"] is True
        assert (await site.admin.delete("/admin/tenants/alpha")).status_code == 409
        assert await site.metric('forebay_weight{class="interactive",tenant="alpha"}') == 2


async def test_a_deleted_tenant_is_out_with_its_keys(start: Start) -> None:
    async with start({**KEPT, "tenant_defaults": {}}) as site:
        assert (await site.admin.post("/admin/tenants", json={"id": "gamma"})).status_code == 201
        key = await made(site, tenant="gamma")
        assert (await ask(site, key["secret"])).status_code == 200
        assert (await site.admin.delete("/admin/tenants/gamma")).status_code == 200
        assert (await ask(site, key["secret"])).status_code == 401
        assert (await site.admin.get("/admin/tenants/gamma")).status_code == 404
    async with start(KEPT) as site:
        assert (await site.admin.post("/admin/tenants", json={"id": "gamma"})).status_code == 201
        assert (await site.complete("gamma")).status_code == 200
        assert (await site.admin.delete("/admin/tenants/gamma")).status_code == 200
        assert (await site.complete("gamma")).status_code == 403


async def test_a_reload_keeps_what_was_made_here(tmp_path: Path) -> None:
    file = tmp_path / "forebay.yaml"
    file.write_text(yaml.safe_dump(merged(BASE, KEPT)))
    async with running(tmp_path, KEPT, config_path=file) as site:
        assert (await site.admin.post("/admin/tenants", json={"id": "gamma", "weight": 3})).status_code == 201
        tenants = [{"id": "alpha"}, {"id": "gamma", "class": "batch"}]
        file.write_text(yaml.safe_dump(merged(BASE, {**KEPT, "tenants": tenants})))
        assert (await site.admin.post("/admin/policies", json={"reload": True})).status_code == 200
        gamma = (await site.admin.get("/admin/tenants/gamma")).json()
        assert (gamma["weight"], gamma["class"], gamma["set_in_file"]) == (3, "batch", ["class"])
        assert (await site.complete("beta")).status_code == 403
        entries = (await site.admin.get("/admin/audit?limit=1")).json()["entries"]
        assert entries[0]["action"] == "config.reload"
        assert "tenants[beta]" in entries[0]["after"]["changed"]


BAD: list[tuple[str, str, Any, int, str | None]] = [
    ("POST", "/admin/keys", {}, 400, "tenant"),
    ("POST", "/admin/keys", {"tenant": "nobody"}, 400, "tenant"),
    ("POST", "/admin/keys", {"tenant": 5}, 400, "tenant"),
    ("POST", "/admin/keys", {"tenant": "alpha", "usr": "x"}, 400, "usr"),
    ("POST", "/admin/keys", {"tenant": "alpha", "expires_in_s": -1}, 400, "expires_in_s"),
    ("POST", "/admin/keys", {"tenant": "alpha", "expires_at": "2001-01-01T00:00:00Z"}, 400, "expires_at"),
    ("POST", "/admin/keys", {"tenant": "alpha", "expires_at": "2101-01-01T00:00:00"}, 400, "expires_at"),
    ("POST", "/admin/keys", {"tenant": "alpha", "expires_at": "2101-01-01T00:00:00Z", "expires_in_s": 1}, 400, None),
    ("POST", "/admin/keys", {"tenant": "alpha", "groups": "g"}, 400, "groups"),
    ("POST", "/admin/keys", ["alpha"], 400, None),
    ("POST", "/admin/keys/x/rotate", {"overlap_s": 1e12}, 400, "overlap_s"),
    ("POST", "/admin/keys/x/rotate", {}, 404, "key"),
    ("DELETE", "/admin/keys/x", None, 404, "key"),
    ("GET", "/admin/keys/x", None, 404, "key"),
    ("POST", "/admin/tenants", {}, 400, "id"),
    ("POST", "/admin/tenants", {"id": "a b"}, 400, "id"),
    ("POST", "/admin/tenants", {"id": "alpha"}, 409, "id"),
    ("POST", "/admin/tenants", {"id": "new", "weight": 0}, 400, "weight"),
    ("POST", "/admin/tenants", {"id": "new", "class": "none"}, 400, "class"),
    ("POST", "/admin/tenants", {"id": "new", "limits": {"concurent": 1}}, 400, "limits.concurent"),
    ("POST", "/admin/tenants", {"id": "new", "organisation": "none"}, 400, "organisation"),
    ("POST", "/admin/tenants", {"id": "new", "models": ["echo", "ecco"]}, 400, "models.1"),
    ("POST", "/admin/tenants", {"id": "new", "requires": {"region": "mars"}}, 400, "requires"),
    ("PATCH", "/admin/tenants/nobody", {"weight": 1}, 404, "tenant"),
    ("PATCH", "/admin/tenants/alpha", {"id": "beta"}, 400, "id"),
    ("DELETE", "/admin/tenants/nobody", None, 404, "tenant"),
    ("GET", "/admin/tenants/nobody", None, 404, "tenant"),
    ("GET", "/admin/audit?limit=0", None, 400, "limit"),
    ("GET", "/admin/audit?limit=x", None, 400, "limit"),
]


async def test_what_is_wrong_is_named_and_changes_nothing(start: Start) -> None:
    """Also security 45: NaN is no JSON; and security 21: quotes and comment marks are only text."""
    async with start(KEPT) as site:
        for method, path, body, status, param in BAD:
            answer = await site.admin.request(method, path, json=body) if body is not None else None
            answer = answer or await site.admin.request(method, path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), (path, body, answer.text)
        answer = await site.admin.post("/admin/tenants", content=b'{"id": "new", "weight": NaN}')
        assert answer.status_code == 400
        for path, half in (("/admin/keys", "name"), ("/admin/keys", "tenant"), ("/admin/tenants", "id")):
            content = json.dumps({"tenant": "alpha", half: "\ud83d"}).encode()  # half a character
            assert (await site.admin.post(path, content=content)).status_code == 400
        content = json.dumps({"requires": {"region": "\ud83d"}}).encode()
        assert (await site.admin.patch("/admin/tenants/alpha", content=content)).status_code == 400
        for field in ("user", "name", "roles"):  # nothing that would steer the terminal of `forebay keys list`
            value = {"user": "a\x1b[2Jb", "name": "a\u202eb", "roles": ["\x00"]}[field]
            refused = await site.admin.post("/admin/keys", json={"tenant": "alpha", field: value})
            assert (refused.status_code, refused.json()["error"]["param"].split(".")[0]) == (400, field)
        key = await made(site, user="'; DROP TABLE keys; --", name='"')
        assert (await ask(site, key["secret"])).status_code == 200
        entries = (await site.admin.get("/admin/audit")).json()["entries"]
        assert [entry["action"] for entry in entries] == ["key.create"]


async def test_without_state_the_answer_names_the_key(start: Start) -> None:
    async with start() as site:
        for method, path, body in (
            ("GET", "/admin/keys", None),
            ("POST", "/admin/keys", {"tenant": "alpha"}),
            ("POST", "/admin/tenants", {"id": "gamma"}),
            ("PATCH", "/admin/tenants/alpha", {"weight": 2}),
            ("GET", "/admin/audit", None),
        ):
            answer = await site.admin.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (409, "state.path"), path


async def test_a_key_that_no_policy_takes_says_so(start: Start) -> None:
    async with start({"state": {"path": "state"}}) as site:
        key = await made(site)
        assert "'jwt', which takes no API keys" in key["warning"]


async def test_a_disk_that_is_full_changes_nothing_and_says_503(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(KEPT) as site:
        store = site.gateway.parts.registrar._store
        assert store is not None
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        answer = await site.admin.post("/admin/keys", json={"tenant": "alpha", "name": "n" * 250})
        for _ in range(200):  # what is free inside the file goes first
            if answer.status_code != 201:
                break
            answer = await site.admin.post("/admin/keys", json={"tenant": "alpha", "name": "n" * 250})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unavailable")
        count = len((await site.admin.get("/admin/keys")).json()["keys"])
        assert len((await site.admin.get("/admin/audit?limit=1000")).json()["entries"]) == count
        store._db.execute("PRAGMA max_page_count = 100000")
        assert (await site.admin.post("/admin/keys", json={"tenant": "alpha"})).status_code == 201


async def test_an_entry_the_log_did_not_take_is_entered_later(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(KEPT) as site:
        registrar = site.gateway.parts.registrar
        with monkeypatch.context() as patch:

            def full(entry: Any) -> Any:
                raise OSError("No space left on device")

            patch.setattr(registrar._audit, "append", full)
            assert (await site.admin.post("/admin/keys", json={"tenant": "alpha"})).status_code == 201
            assert (await site.admin.post("/admin/policies", json={"scheduling": {"use": "vtc"}})).status_code == 200
            assert (await site.admin.delete("/admin/tenants/alpha/cache")).status_code == 200
            assert (await site.admin.get("/admin/audit")).json()["entries"] == []
        await until(lambda: len(registrar._audit.last(3)) == 3, "the entries")
        assert [entry["action"] for entry in reversed(registrar._audit.last(9))] == [
            "key.create",
            "policies.swap",
            "cache.purge",
        ]


async def test_swaps_and_purges_are_in_the_log_without_secrets(start: Start) -> None:
    async with start(KEPT, env={"FOREBAY_ADMIN_TOKEN": "a secret"}) as site:
        site.admin.headers["authorization"] = "Bearer a secret"
        assert (await site.admin.post("/admin/policies", json={"scheduling": {"use": "vtc"}})).status_code == 200
        keyed = {"use": "api_key", "with": {"keys": [{"hash": "sha256:" + "7" * 64, "tenant": "alpha"}]}}
        assert (await site.admin.post("/admin/policies", json={"auth": keyed})).status_code == 200
        assert (await site.admin.delete("/admin/tenants/alpha/cache")).status_code == 200
        assert (await site.admin.post("/admin/policies", json={"auth": {"use": "nope"}})).status_code == 400
        text = (await site.admin.get("/admin/audit")).text
        entries = json.loads(text)["entries"]
        assert [entry["action"] for entry in entries] == ["cache.purge", "policies.swap", "policies.swap"]
        assert entries[2]["before"] == {"scheduling": {"use": "fcfs", "with": {}}}
        assert entries[0]["after"]["zeroed_blocks"] == 0
        assert {entry["actor"]["name"] for entry in entries} == {"admin"}
        assert "7" * 64 not in text
        assert token("alpha") not in text


async def test_operators_have_tokens_and_names_of_their_own(start: Start) -> None:
    """The audit log says who it was, over the API and on the console."""
    admin = {"operators": {"ann": "ANN_TOKEN"}}
    env = {"FOREBAY_ADMIN_TOKEN": "a secret", "ANN_TOKEN": "another"}
    async with start({**KEPT, "admin": admin}, env=env, ready=False) as site:
        for secret in ("a secret", "another"):
            headers = {"authorization": f"Bearer {secret}"}
            assert (await site.admin.post("/admin/keys", json={"tenant": "alpha"}, headers=headers)).status_code == 201
        refused = await site.admin.get("/admin/keys", headers={"authorization": "Bearer ANN_TOKEN"})
        assert refused.status_code == 401
        entries = (await site.admin.get("/admin/audit", headers=headers)).json()["entries"]
        assert [entry["actor"]["name"] for entry in entries] == ["ann", "admin"]


@pytest.mark.parametrize(
    ("env", "words"),
    [({}, r"admin\.operators\.ann: the variable ANN_TOKEN is not set"), ({"ANN_TOKEN": "a secret"}, "the same token")],
    ids=["missing", "shared"],
)
async def test_an_operator_without_a_token_of_its_own_stops_the_start(
    start: Start, env: dict[str, str], words: str
) -> None:
    changes = {"admin": {"operators": {"ann": "ANN_TOKEN"}}}
    with pytest.raises(BuildError, match=words):
        async with start(changes, env={"FOREBAY_ADMIN_TOKEN": "a secret", **env}):
            raise AssertionError("unreachable")


async def test_a_token_that_expires_during_a_stream_ends_with_the_next_request(start: Start) -> None:
    """security 33: the stream is finished, as documented; the next request gets 401."""
    strict = {**AUTH, "with": {**AUTH["with"], "leeway_s": 0}}
    async with start({"policies": {"auth": strict}}, echo=Echo(step_s=0.02)) as site:
        headers = {"authorization": f"Bearer {token('alpha', exp=time.time() + 2.0)}"}
        body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 150, "stream": True}
        async with site.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert (await site.http.get("/v1/models", headers=headers)).status_code == 401
