"""Admission and load control in the live gateway: predicted waits, what is lessened, and that nothing stands still."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

from gateway.gate import MAX_WAITING
from policies.types import QueueSnapshot, TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, pool, until
from tests.gateway.test_dispatch import OPEN, backlog, drop
from workers.testing import Echo


def bounded(**config: Any) -> dict[str, Any]:
    return {"admission": {"use": "bounded", "with": config}, "quota": {"use": "unlimited"}}


async def measured(site: Site) -> float:
    """The service rate, once there is one."""
    rate: float = await until(lambda: site.dispatcher.queue.snapshot("alpha").service_rate, "a measured rate")  # type: ignore[arg-type]
    return rate


def looked_at(site: Site) -> list[QueueSnapshot]:
    """Every look that a policy takes at the queue from now on."""
    seen: list[QueueSnapshot] = []
    snapshot = site.dispatcher.queue.snapshot

    def noted(tenant: TenantId, **options: Any) -> QueueSnapshot:
        seen.append(snapshot(tenant, **options))
        return seen[-1]

    site.dispatcher.queue.snapshot = noted  # type: ignore[method-assign]
    return seen


async def test_what_could_not_start_in_time_is_refused_with_a_retry_after_that_works(start: Start) -> None:
    """issue 4, gateway B9: 429 at the door instead of after the wait; who comes back as told is let in."""
    changes = {"models": [pool(max_running=2)], "policies": bounded(max_wait_s=2.5)}
    async with start(changes, echo=Echo(step_s=0.005)) as site:
        calls = await backlog(site, {"alpha": 30}, max_tokens=60)
        assert 0 < await measured(site) < 1000, "two tokens in 5 ms, and the way there and back"
        seen = looked_at(site)
        answer = await site.complete(max_tokens=4)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "predicted_wait"
        told, found = int(answer.headers["retry-after"]), seen[-1]
        rate = found.service_rate or 0.0
        expected = found.queued_tokens * (found.used_ratio or 1.0) / rate - 2.5
        assert expected - 1 <= told <= expected + 2
        # Another tenant's own line is empty, so it waits for nobody.
        assert (await site.complete("beta", max_tokens=4)).status_code == 200
        await asyncio.sleep(told)
        async with asyncio.timeout(60):
            while (again := await site.complete(max_tokens=4)).status_code == 429:
                assert (seen[-1].service_rate or 0.0) < rate, "at the rate that was foreseen there is room"
                await asyncio.sleep(int(again.headers["retry-after"]))
        assert again.status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}


async def test_a_burst_before_the_first_worker_is_refused_nothing(start: Start) -> None:
    """gateway B7: seconds of waiting for a model to load are no measurement of how slow its workers are."""
    changes = {"models": [pool(max_running=4)], "policies": bounded(max_wait_s=3)}
    async with start(changes, echo=Echo(load_s=2.0, step_s=0.002), ready=False) as site:
        await until(lambda: site.dispatcher.model.loaded, "files loaded")
        early = [asyncio.create_task(site.complete(max_tokens=20)) for _ in range(20)]
        await until(lambda: site.dispatcher.ready, "a worker")
        later = []
        while len(later) < 60:
            later.append(asyncio.create_task(site.complete(max_tokens=20)))
            await asyncio.sleep(0.02)
        assert {answer.status_code for answer in await asyncio.gather(*early, *later)} == {200}


async def test_short_answers_to_large_allowances_are_predicted_as_short(start: Start) -> None:
    """Callers leave max_tokens high; what they use is a hundredth of it, and so is the wait."""
    changes = {"models": [pool(max_running=2)], "policies": bounded(max_wait_s=5)}
    async with start(changes, echo=Echo(step_s=0.01, stop_after=3)) as site:
        calls = await backlog(site, {"alpha": 80}, max_tokens=400)
        await measured(site)
        seen = site.dispatcher.queue.snapshot("alpha")  # type: ignore[arg-type]
        assert seen.service_rate is not None
        assert seen.queued_tokens / seen.service_rate > 5, "by max_tokens it would have to be refused"
        assert (await site.complete(max_tokens=400)).status_code == 200
        await drop(calls)


async def test_under_overload_output_is_clamped_and_said_so(start: Start) -> None:
    changes = {
        "models": [pool(max_running=2)],
        "policies": bounded(max_wait_s=60, overload={"clamp_max_tokens": 6, "after_s": 0.5}),
    }
    async with start(changes, echo=Echo(step_s=0.005)) as site:
        before = await site.complete(max_tokens=20)
        assert "x-forebay-max-tokens-clamped" not in before.headers
        assert before.json()["usage"]["completion_tokens"] == 20
        calls = await backlog(site, {"alpha": 20, "beta": 1}, max_tokens=60)
        await measured(site)
        asked: list[dict[str, Any]] = [
            {"max_tokens": 20, "n": 2},
            {"max_tokens": 20, "stream": True},
            {"max_tokens": 5},
            {"max_tokens": 20, "min_tokens": 9},
        ]
        answers = await asyncio.gather(*(site.complete(**body) for body in asked))
        clamped = [answer.headers.get("x-forebay-max-tokens-clamped") for answer in answers]
        assert clamped == ["6", "6", None, "9"]
        assert answers[0].json()["usage"]["completion_tokens"] == 12
        assert {choice["finish_reason"] for choice in answers[0].json()["choices"]} == {"length"}
        assert answers[2].json()["usage"]["completion_tokens"] == 5
        assert answers[3].json()["usage"]["completion_tokens"] == 9
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        await site.at_rest()


SMALL = "small-é-мал"
"""A name that no header can hold as it is."""


async def test_what_is_refused_may_run_on_the_fallback_model(start: Start) -> None:
    """Where the tenant may use it, it fits and there is room; else the first refusal stands."""
    changes = {
        "models": [pool(max_running=1), {**pool(max_running=1, max_context=64), "name": SMALL}],
        "policies": bounded(max_queued_per_tenant=3, overload={"fallback_model": SMALL}),
        "tenants": [{"id": "alpha"}, {"id": "beta", "models": [MODEL]}],
    }
    async with start(changes, echo=Echo(step_s=0.02)) as site:
        small = site.gateway.parts.dispatchers[SMALL]
        await until(lambda: small.ready, "both models")
        calls: list[asyncio.Task[Any]] = []
        full = 1 + MAX_WAITING
        for tenant, count, queued in (("alpha", full, 0), ("alpha", 3, 3), ("beta", 3, 6)):
            calls += [asyncio.create_task(site.complete(tenant, max_tokens=400)) for _ in range(count)]
            await until(lambda: (site.dispatcher.in_flight, len(site.dispatcher.queue)) == (full, queued), "in")  # noqa: B023
        answer = await site.complete(max_tokens=4)
        assert answer.status_code == 200
        assert answer.headers["x-forebay-fallback-model"] == quote(SMALL)
        assert answer.json()["model"] == SMALL
        stream = await site.complete(max_tokens=4, stream=True)
        assert stream.headers["x-forebay-fallback-model"] == quote(SMALL)
        refused = await site.complete("beta", max_tokens=4)
        assert refused.status_code == 429, "it may not use the other model"
        assert refused.json()["error"]["code"] == "tenant_queue_full"
        assert "x-forebay-fallback-model" not in refused.headers
        too_long = await site.complete(prompt=[5] * 70, max_tokens=4)
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (429, "tenant_queue_full")
        assert await site.metric(f'forebay_requests_total{{class="interactive",model="{SMALL}",outcome="ok"') == 2
        await drop(calls)
        await site.at_rest()


async def test_saturation_never_halts_dispatch(start: Start) -> None:
    """issue 4, gateway B7, B15: far more is offered than can run; every slot is busy all the time, refusals are 429."""
    changes = {"models": [pool(max_running=4)], "policies": bounded(max_queued_per_tenant=12, max_queued=20)}
    async with start(changes, echo=Echo(step_s=0.002)) as site:
        handle = site.dispatcher.workers[0]
        stop = asyncio.Event()
        statuses: list[int] = []

        async def caller(tenant: str) -> None:
            while not stop.is_set():
                statuses.append((await site.complete(tenant, max_tokens=10)).status_code)
                if statuses[-1] != 200:
                    await asyncio.sleep(0.05)

        callers = [asyncio.create_task(caller(tenant)) for tenant in ("alpha", "beta") for _ in range(20)]
        await until(lambda: 429 in statuses and handle.stats.running == 4, "saturated")
        full = []
        while statuses.count(200) < 200:
            await asyncio.sleep(0.005)
            assert not site.dispatcher.stalled(), "a slot was empty while requests waited"
            full.append(site.dispatcher.in_flight >= 4)
        assert sum(full) > 0.9 * len(full)
        stop.set()
        await asyncio.gather(*callers)
        assert set(statuses) == {200, 429}
        await site.at_rest()


async def test_a_saturated_queue_without_limits_drains_too(start: Start) -> None:
    async with start({"models": [pool(max_running=8)], "policies": OPEN}) as site:
        calls = await backlog(site, {"alpha": 60, "beta": 60}, max_tokens=4)
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        assert not site.dispatcher.stalled()
        await site.at_rest()
