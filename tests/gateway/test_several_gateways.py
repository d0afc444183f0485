"""Two gateways that count in one ledger (gateway A1 with two replicas): a cap of one tenant holds over both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from gateway.timed import unwrap
from tests.gateway.harness import BASE, Site, running, token, until
from workers.testing import Echo

CAPPED: dict[str, Any] = {"tenants": [{"id": "alpha", "limits": {"tokens_per_day": 600}}, {"id": "beta"}]}


STATUSES = {200, 409, 503}


@contextlib.asynccontextmanager
async def several(folder: Path, count: int, echo: Echo, tenants: dict[str, Any]) -> AsyncIterator[list[Site]]:
    """So many gateways on one ledger, which the first one keeps."""
    async with contextlib.AsyncExitStack() as stack:
        sites = []
        for place in range(count):
            quota: dict[str, Any] = {"use": "shared", "with": {"timeout_s": 20.0}}
            if not place:
                quota = {"use": "ledger", "with": {"serve": True}}
            settings = {**tenants, "state": {"path": str(folder / "state")}}
            settings["policies"] = {**BASE["policies"], "quota": quota}
            (folder / str(place)).mkdir()
            site = await stack.enter_async_context(running(folder / str(place), settings, echo=echo))
            if place:
                live = site.gateway.parts.runtime.current.quota
                await until(live.writable, "it is connected")  # type: ignore[attr-defined]
            sites.append(site)
        yield sites


async def send(site: Site, key: str, **body: Any) -> httpx.Response:
    return await site.complete(headers={"idempotency-key": key}, **{"max_tokens": 20, **body})


async def test_keys_and_what_is_left_are_one_over_three_gateways(tmp_path: Path) -> None:
    tenants = {"tenants": [{"id": "alpha", "limits": {"tokens_per_day": 1000, "max_output_tokens": 30}}]}
    async with several(tmp_path, 3, Echo(step_s=0.005), tenants) as sites:
        await _runs_once(sites)
        await _is_free_after_a_failure(*sites[:2])
        for site in sites:
            await site.at_rest()
        report = (await sites[2].admin.get("/admin/usage")).json()["total"]
        assert report["requests"] == 2
        await _left(sites, 1000 - report["input_tokens"] - report["output_tokens"])


async def _runs_once(sites: list[Site]) -> None:
    """security 75: the same key 50 times at once; one generation, one charge, replays or 409; another body is 422."""
    body: dict[str, Any] = {"prompt": [60, 61, 62], "ignore_eos": True}
    answers = await asyncio.gather(*(send(sites[i % 3], "one", **body) for i in range(50)))
    good = [answer for answer in answers if answer.status_code == 200]
    assert good
    assert len({answer.json()["id"] for answer in good}) == 1
    assert [answer.headers.get("x-forebay-replayed") for answer in good].count(None) == 1
    for answer in answers:
        assert answer.status_code in STATUSES
        if answer.status_code == 409:
            assert answer.json()["error"]["code"] == "idempotency_key_elsewhere"
            assert answer.headers["retry-after"] == "1"
        elif answer.status_code == 503:  # it had joined one that was told no
            assert answer.json()["error"]["code"] == "replay_lost"
    later = [await send(site, "one", **body) for site in sites]
    assert sorted(answer.status_code for answer in later) == [200, 409, 409]
    assert [(await send(site, "one", **{**body, "max_tokens": 3})).status_code for site in sites] == [422] * 3
    for site in sites:
        await site.at_rest()
    report = (await sites[2].admin.get("/admin/usage")).json()
    assert (report["total"]["requests"], report["total"]["output_tokens"]) == (1, 20)


async def _is_free_after_a_failure(one: Site, two: Site) -> None:
    refused = await send(one, "k", prompt=[60], max_tokens=31)
    assert refused.status_code == 400
    assert (await send(two, "k", prompt=[60])).status_code == 200
    assert (await send(one, "k", prompt=[60])).status_code == 409


async def _left(sites: list[Site], tokens: int) -> None:
    """Every gateway tells what is left, and says so where it cannot know."""
    caller = {"authorization": f"Bearer {token('alpha')}"}
    for site in sites:
        own = await site.http.get("/v1/usage", headers=caller)
        limits = {limit["limit"]: limit["remaining"] for limit in own.json()["limits"]}
        assert limits == {"tokens_per_day": tokens}
    line = unwrap(sites[1].gateway.parts.runtime.current.quota)._line
    line._run.cancel()
    await until(lambda: not line.up, "it has hung up")
    told = await sites[1].http.get("/v1/usage", headers=caller)
    assert (told.status_code, told.json()["error"]["code"]) == (503, "quota_unavailable")


async def test_twenty_calls_at_each_of_two_gateways_pass_one_cap(tmp_path: Path) -> None:
    state = {"path": str(tmp_path / "state")}
    quotas = ({"use": "ledger", "with": {"serve": True}}, {"use": "shared", "with": {"timeout_s": 5.0}})
    keeping, asking = ({**CAPPED, "state": state, "policies": {**BASE["policies"], "quota": quota}} for quota in quotas)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    async with running(tmp_path / "b", asking, echo=Echo(step_s=0.005)) as two:
        assert (await two.complete()).status_code == 503, "its keeper is not there yet"
        async with running(tmp_path / "a", keeping, echo=Echo(step_s=0.005)) as one:
            quota = two.gateway.parts.runtime.current.quota
            await until(quota.writable, "a keeper that comes later is taken up")  # type: ignore[attr-defined]
            calls = [site.complete(max_tokens=56, ignore_eos=True) for site in (one, two) for _ in range(20)]
            answers = await asyncio.gather(*calls)
            assert sorted({answer.status_code for answer in answers}) == [200, 429]
            passed = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
            assert passed == [60] * 10
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert int(refused.headers["retry-after"]) >= 1
            for site in (one, two):
                await site.at_rest()
                report = (await site.admin.get("/admin/usage")).json()
                assert sum(row["output_tokens"] for row in report["rows"]) == 56 * len(passed)
        await until(lambda: not quota.writable(), "the keeper is gone")  # type: ignore[attr-defined]
        told = await two.complete("beta")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "quota_unavailable")
        assert int(told.headers["retry-after"]) >= 1
        assert await two.metric("forebay_ledger_writable") == 0
