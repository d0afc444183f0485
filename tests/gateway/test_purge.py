"""Whom a purge asks, what it finds, and that its receipt never claims more than was done."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.labels import Labels, Subject
from gateway.pool import Pool, PoolListener, WorkerState
from gateway.purge import Purger, Receipt, valid
from gateway.scopes import PER_TENANT
from gateway.settings import Launch, Settings
from gateway.settings import Pool as PoolConfig
from gateway.tenants import Tenants
from policies.types import Principal, TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import AUTH, BASE, MODEL, Site, token, until
from workers.launchers.base import LaunchContext
from workers.launchers.static import StaticLauncher
from workers.protocol import Purged
from workers.testing import Echo

ALPHA = TenantId("alpha")
GROUPS = {"policies": {**BASE["policies"], "auth": {**AUTH, "with": {**AUTH["with"], "groups_claim": "groups"}}}}


async def ask(site: Site, prompt: list[int], tenant: str = "alpha", tags: str = "", **claims: Any) -> int:
    """One completion; returns how many of its prompt tokens were cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    if tags:
        body["metadata"] = {"cache_tags": tags}
    headers = {"authorization": f"Bearer {token(tenant, **claims)}"}
    answer = await site.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt(number: int) -> list[int]:
    return [40 + number] * 64


async def test_a_worker_that_drains_is_swept_too(start: Start) -> None:
    """security 15: it has blocks until it is gone."""
    async with start() as site:
        assert (await site.complete(prompt=[5] * 64, max_tokens=2)).status_code == 200
        [handle] = site.dispatcher.workers
        handle.state = WorkerState.DRAINING
        receipt = (await site.admin.delete("/admin/tenants/alpha/cache")).json()
        assert receipt["zeroed_blocks"] >= 4
        assert receipt["complete"]


async def test_a_user_a_group_and_a_document_are_purged_apart(start: Start) -> None:
    """Leavers, permission changes, deleted documents: their blocks go, those of the others are hit as before."""
    async with start(GROUPS) as site:
        ana, ben = {"sub": "ana", "groups": ["law", "eu"]}, {"sub": "ben", "groups": ["eu"]}
        for _ in range(2):
            hits = [
                await ask(site, prompt(1), tags="doc-7, doc-8", **ana),
                await ask(site, prompt(2), **ana),
                await ask(site, prompt(3), tags="doc-8", **ben),
                await ask(site, prompt(4), **ben),
                await ask(site, prompt(1), "beta", tags="doc-7", **ana),
            ]
        assert all(hits)

        async def purge(query: str) -> tuple[dict[str, Any], list[bool]]:
            answer = await site.admin.delete(f"/admin/tenants/alpha/cache?{query}")
            assert answer.status_code == 200, answer.text
            hit = [
                bool(await ask(site, prompt(number), tenant, **who))
                for number, tenant, who in [(1, "alpha", ana), (2, "alpha", ana), (3, "alpha", ben), (4, "alpha", ben)]
            ]
            hit.append(bool(await ask(site, prompt(1), "beta", **ana)))
            return answer.json(), hit

        receipt, hit = await purge("tag=doc-7")
        assert hit == [False, True, True, True, True]
        assert receipt["subject"] == {"tag": ["doc-7"]}
        assert receipt["zeroed_blocks"] >= 4
        assert receipt["epoch"] == 0
        assert not receipt["widened"]
        _, hit = await purge("user=ben")
        assert hit == [True, True, False, False, True]
        _, hit = await purge("group=law")
        assert hit == [False, False, True, True, True]
        _, hit = await purge("user=ana&user=ben")
        assert hit == [False, False, False, False, True]
        receipt, _ = await purge("user=nobody")
        assert receipt["zeroed_blocks"] == 0


async def test_who_hit_a_document_without_its_tag_has_no_copy_of_it_left(start: Start) -> None:
    """The same text by somebody who gave no tag: the block bears the tag as soon as one request with it hit it."""
    async with start() as site:
        await ask(site, prompt(1), sub="ben")
        assert await ask(site, prompt(1), tags="doc", sub="ana")
        await site.admin.delete("/admin/tenants/alpha/cache?tag=doc")
        assert await ask(site, prompt(1), sub="ben") == 0


async def test_a_request_that_waits_through_the_purge_is_swept_up_behind(start: Start) -> None:
    """It began before the document was deleted and ran after: what it left is zeroed when it ends."""
    async with start({"models": [one_slot()]}, echo=Echo(step_s=0.02)) as site:
        first = asyncio.create_task(site.complete(prompt=[9] * 8, max_tokens=20))
        await until(lambda: site.dispatcher.in_flight, "the slot is taken")
        second = asyncio.create_task(site.complete(prompt=[8] * 8, max_tokens=20))
        late = asyncio.create_task(ask(site, prompt(1), tags="doc", sub="ana"))
        await until(lambda: len(site.dispatcher.queue) or site.dispatcher.in_flight > 2, "they wait")
        receipt = (await site.admin.delete("/admin/tenants/alpha/cache?tag=doc")).json()
        assert receipt["complete"]
        await asyncio.gather(first, second, late)
        await site.at_rest()
        assert await ask(site, prompt(1), sub="ben") == 0


def one_slot() -> dict[str, Any]:
    engine = {"blocks": 256, "max_running": 1}
    return {"name": MODEL, "source": "model", "pools": [{"name": "local", "launch": {"use": "echo"}, "engine": engine}]}


async def test_a_purge_of_what_streams_is_followed_to_its_end(start: Start) -> None:
    """security 15: 202 with the pending count, later a signed receipt that is complete, never a bare 200."""
    async with start(echo=Echo(step_s=0.01)) as site:
        async with site.stream(prompt=prompt(1), max_tokens=400) as response:
            lines = response.aiter_lines()
            await anext(lines)
            answer = await site.admin.delete("/admin/tenants/alpha/cache")
            receipt = answer.json()
            assert answer.status_code == 202
            assert receipt["pending_blocks"] >= 4
            assert not receipt["complete"]
            again = await site.admin.get(f"/admin/cache/receipts/{receipt['receipt']}")
            assert again.status_code == 202
        await site.at_rest()
        last = await site.admin.get(f"/admin/cache/receipts/{receipt['receipt']}")
        assert last.status_code == 200
        assert last.json()["complete"]
        assert last.json()["zeroed_blocks"] >= receipt["pending_blocks"]
        assert last.json()["pending_blocks"] == 0
        for body, truth in ((last.json(), True), ({**last.json(), "zeroed_blocks": 0}, False), ({}, False)):
            verified = await site.admin.post("/admin/cache/receipts/verify", json=body)
            assert verified.json() == {"valid": truth}


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/admin/tenants/alpha/cache?usr=x", 400, "usr"),
        ("/admin/tenants/alpha/cache?user=", 400, "user"),
        ("/admin/tenants/alpha/cache?tag=a,b", 400, "tag"),
        ("/admin/tenants/alpha/cache?tag=%20a", 400, "tag"),
        ("/admin/tenants/alpha/cache?" + "&".join([f"user=x{n}" for n in range(65)]), 400, "user"),
        ("/admin/tenants/nobody/cache?user=x", 404, "tenant"),
        ("/admin/public-prefixes/none", 404, "prefix"),
    ],
)  # fmt: skip
async def test_what_cannot_be_purged_is_refused(start: Start, path: str, status: int, param: str) -> None:
    async with start(ready=False) as site:
        answer = await site.admin.delete(path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_tags_that_cannot_be_read_are_the_callers_mistake(start: Start) -> None:
    async with start() as site:
        for tags in (",".join(map(str, range(17))), "x" * 129, "a\nb"):
            answer = await site.complete(metadata={"cache_tags": tags})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata.cache_tags")
        assert (await site.complete(metadata={"cache_tags": " , a ,, a"})).status_code == 200


class Nobody(PoolListener):
    """Hears nothing."""


def away(tmp_path: Path) -> Pool:
    address = f"unix:{tmp_path}/nobody.sock"
    config = PoolConfig(name="p", launch=Launch(use="static", addresses=(address,)))
    return Pool("m", "source", config, StaticLauncher(LaunchContext(addresses=(address,))), Nobody())


async def test_a_worker_of_somebody_else_that_is_not_connected_is_named(tmp_path: Path) -> None:
    """security 15: it may live, with everything that it cached, and be connected again."""
    pool = away(tmp_path)
    pool.start()
    try:
        await until(lambda: pool.snapshot()[0]["address"], "the place is taken")
        tenants = Tenants(Settings.model_validate(BASE))
        tenants.used(tenants.get(ALPHA), b"scope")
        purger = Purger(tenants, [pool], b"secret")
        receipt = await purger.purge(ALPHA)
        assert receipt.failed == {"m/p-0": "not connected"}
        assert not receipt.complete
        # What was named by label could be hit again when it is back: so all of the tenant is made unreachable.
        before = tenants.epoch(ALPHA)
        part = await purger.purge(Subject(ALPHA, users=("ana",)))
        assert part.widened
        assert tenants.epoch(ALPHA) == part.epoch == before + 1
    finally:
        await pool.stop()


async def test_a_receipt_is_not_complete_when_scopes_were_forgotten() -> None:
    """security 15, scope ``user``: with more users than are remembered the sweep cannot name them all."""
    tenants = Tenants(Settings.model_validate(BASE))
    purger = Purger(tenants, [], b"secret")
    for number in range(PER_TENANT):
        tenants.used(tenants.get(ALPHA), number.to_bytes(4, "big"))
    assert (await purger.purge(ALPHA)).body()["complete"]
    for number in range(PER_TENANT + 1):
        tenants.used(tenants.get(ALPHA), number.to_bytes(4, "big"))
    body = (await purger.purge(ALPHA)).body()
    assert body["scopes"] == PER_TENANT
    assert body["complete"] is False
    assert [reason for reason in body["incomplete_because"] if "more cache scopes" in reason]
    assert valid(body, b"secret")
    assert not valid(body, b"another")


def test_a_label_names_one_thing_of_one_tenant() -> None:
    """security 3, 11: no tenant, kind and name encode like others, and nothing can be read back."""
    labels = Labels(b"secret")
    found = [
        label
        for tenant in ("a", "ab", "a\0", "")
        for subject in (
            Subject(TenantId(tenant), users=("b", "")),
            Subject(TenantId(tenant), groups=("b",), tags=("b",)),
        )
        for label in labels.of_subject(subject)
    ]
    assert len(set(found)) == len(found)
    caller = Principal(TenantId("a"), user="b", groups=frozenset({"b"}))
    assert set(labels.of_request(caller, {"cache_tags": "b"})) <= set(found)
    assert labels.of_request(Principal(TenantId("a")), {}) == []
    assert set(Labels(b"other").of_request(caller, {})).isdisjoint(found)


def test_a_worker_that_keeps_its_cache_on_a_disk_is_out_of_reach_while_it_is_down() -> None:
    """Its files outlive its process, so a purge that it missed must not be forgotten."""
    tiers = [{"kind": "host", "size": "1MiB"}, {"kind": "disk", "path": "kv", "size": "1MiB"}]
    found = []
    for engine in ({}, {"tiers": tiers[:1]}, {"tiers": tiers}):
        config = PoolConfig.model_validate({"name": "p", "engine": engine})
        pool = Pool("m", "source", config, StaticLauncher(LaunchContext(addresses=("unix:/nobody",))), Nobody())
        found.append(pool.out_of_reach)
    assert found == [[], [], ["m/p-0"]]


def test_a_receipt_counts_every_tier(tmp_path: Path) -> None:
    """First what is gone at once, then also what was in use or a file."""
    [worker] = away(tmp_path).handles
    receipt = Receipt("r", "alpha", 1, 0.0, 1, secret=b"secret")
    first = Purged("p", 3, 2, tiers={"host": 5, "disk": 0})
    receipt.began(worker, first)
    assert receipt.body()["workers"]["m/p-0"]["tiers"] == {"device": 3, "host": 5, "disk": 0}
    receipt.ended(worker, first, Purged("p", 4, 0, tiers={"host": 5, "disk": 2}))
    body = receipt.body()
    assert body["workers"]["m/p-0"] == {
        "zeroed": 11, "pending": 0, "tiers": {"device": 4, "host": 5, "disk": 2},
    }  # fmt: skip
    assert body["zeroed_blocks"] == 11
    assert body["complete"]
