"""Requests from the caller's side: quotas, time limits, refusals, disconnects, losses, a drain."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

import httpx
import pytest

from gateway.gate import MAX_WAITING
from policies.spi import AuthError, NoConfig, PolicySpec, PolicyUnavailableError, hookimpl
from policies.types import JobEvent, JobId, Principal, QuotaDecision, Transition, Usage
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Settlements, Site, events, pool, tickets, token, until
from workers.testing import Echo

SLOW = Echo(step_s=0.01)


def limits(**values: int) -> dict[str, Any]:
    return {"tenants": [{"id": "alpha", "limits": values}, {"id": "beta"}]}


# -- refusals ---------------------------------------------------------------------------------------------------------


async def test_timeouts_give_their_slots_back(start: Start) -> None:
    """gateway A5: eight calls run into the time limit, all four slots are free at once afterwards."""
    changes = {**limits(concurrent=4), "timeouts": {"first_token_s": 1.0}}
    async with start(changes, echo=Echo(step_s=1.5)) as site:
        answers = await asyncio.gather(*(site.complete() for _ in range(8)))
        assert sorted(answer.status_code for answer in answers) == [429] * 4 + [504] * 4
        assert site.slots("alpha") == 0
        await site.at_rest()


async def test_a_full_queue_is_429_and_streams_say_so_too(start: Start) -> None:
    """gateway B15, C11: back-pressure is 429 with Retry-After as a status, never 500, never inside a 200."""
    changes = {
        "models": [pool(max_running=1)],
        "policies": {"admission": {"use": "bounded", "with": {"max_queued_per_tenant": 2}}},
    }
    async with start(changes, echo=Echo(step_s=0.02)) as site:
        answers = await asyncio.gather(*(site.complete(max_tokens=10, stream=i % 2 == 0) for i in range(12)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        refused = [answer for answer in answers if answer.status_code == 429]
        assert {answer.json()["error"]["code"] for answer in refused} == {"tenant_queue_full"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        await site.at_rest()


async def test_a_wait_that_runs_out_is_429_with_workers_and_503_without(start: Start) -> None:
    """gateway B9: busy and dead are told apart."""
    changes = {"models": [pool(max_running=1)], "classes": {"interactive": {"priority": 1, "max_wait_s": 0.3}}}
    async with start(changes, echo=Echo(step_s=0.05)) as site:
        busy = [asyncio.create_task(site.complete(max_tokens=60)) for _ in range(1 + MAX_WAITING)]
        await until(lambda: site.dispatcher.in_flight == 1 + MAX_WAITING, "the worker is busy")
        waited = await site.complete()
        assert waited.status_code == 429
        assert waited.json()["error"]["code"] == "queue_timeout"
        assert int(waited.headers["retry-after"]) >= 1
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)


async def test_without_a_worker_the_wait_ends_in_503(start: Start) -> None:
    """gateway B9."""
    changes = {"classes": {"interactive": {"priority": 1, "max_wait_s": 0.3}}}
    async with start(changes, echo=Echo(fail_start=True), ready=False) as site:
        await until(lambda: site.dispatcher.model.loaded, "files loaded")
        answer = await site.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_worker"
        assert int(answer.headers["retry-after"]) >= 1


async def test_one_tenants_mistakes_take_no_worker_from_another(start: Start) -> None:
    """gateway E3: fifty over-length requests that the engine refuses, then a good one of another tenant."""
    async with start({"models": [pool(blocks=8)]}) as site:
        # The gateway believes in more room than there is, so that the engine has to refuse.
        handle = site.dispatcher.workers[0]
        handle.hello = type(handle.hello)(**{**_fields(handle.hello), "blocks": 256})  # type: ignore[arg-type,misc]
        site.dispatcher.model.worker_up(handle.name, handle.hello)  # type: ignore[arg-type]
        answers = await asyncio.gather(*(site.complete(prompt=[5] * 300) for _ in range(50)))
        assert {answer.status_code for answer in answers} == {400}
        assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}
        assert not handle.breaker.is_open
        assert (await site.complete("beta")).status_code == 200


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


class _Broken:
    """Policies that fail in one way or another."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def fail(self) -> None:
        if self.how == "raises":
            raise RuntimeError("secret detail")
        if self.how == "unavailable":
            raise PolicyUnavailableError("store down", retry_after_s=7)
        if self.how == "hangs":
            await asyncio.sleep(60)

    async def authenticate(self, request: Any) -> Principal:
        await self.fail()
        raise AuthError("no")

    async def reserve(self, job: Any, now: float) -> QuotaDecision:
        await self.fail()
        return QuotaDecision(True)

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> dict[str, Any]:
        return {"refunded": 0}

    def dump(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("kind", ["auth", "quota"])
async def test_a_policy_that_fails_lets_nobody_in(start: Start, kind: Any) -> None:
    """DESIGN §4: fails closed with 503 and Retry-After, within its time budget, and says nothing of why."""
    broken = _Broken("raises")
    spec = PolicySpec(kind, "broken", NoConfig, lambda config, ctx: broken, "Fails.")
    changes = {"policies": {kind: {"use": "broken", "with": {}}}, "timeouts": {"policy_s": 0.2}}
    async with start(changes, policies=[spec]) as site:
        for how in ("raises", "unavailable", "hangs"):
            broken.how = how
            for stream in (False, True):
                answer = await site.complete(stream=stream)
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == f"{kind}_unavailable"
                assert answer.headers["retry-after"] == ("7" if how == "unavailable" else "1")
                assert "secret" not in answer.text
        assert await site.metric("forebay_isolated_faults_total") == 6
        assert len(site.dispatcher.queue) == 0


# -- time limits --------------------------------------------------------------------------------------------------


async def test_no_first_token_in_time_is_504(start: Start) -> None:
    async with start({"timeouts": {"first_token_s": 0.2}}, echo=Echo(step_s=0.5)) as site:
        for stream in (False, True):
            answer = await site.complete(stream=stream)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "first_token_timeout"
        await site.at_rest()


async def test_the_total_limit_ends_a_stream_in_band(start: Start) -> None:
    async with start({"timeouts": {"total_s": 1.0}}, echo=Echo(step_s=0.02)) as site:
        whole = await site.complete(max_tokens=500)
        assert whole.status_code == 504
        assert whole.json()["error"]["code"] == "total_timeout"
        streamed = await site.complete(max_tokens=500, stream=True)
        assert streamed.status_code == 200
        said = events(streamed.text)
        assert said[-1]["error"]["code"] == "total_timeout"
        assert all(event["choices"][0]["finish_reason"] is None for event in said[:-1])
        await site.at_rest()


# -- callers that leave -----------------------------------------------------------------------------------------------


async def test_a_thousand_requests_of_which_a_third_leaves(start: Start) -> None:
    """gateway C17, issue 2: 1,000 requests, 30 % dropped at random moments; afterwards nothing is held anywhere."""
    changes = {
        "models": [pool(max_running=16, blocks=512)],
        "policies": {"admission": {"use": "open"}, "scheduling": {"use": "vtc"}},
        "tenants": [{"id": "alpha", "limits": {"concurrent": 2000}}, {"id": "beta", "limits": {"concurrent": 2000}}],
    }
    rng = random.Random(7)
    async with start(changes, echo=Echo(step_s=0.001)) as site:
        settlements = Settlements(site)
        gate = asyncio.Semaphore(120)
        ended = {"whole": 0, "left": 0}

        async def one(index: int) -> None:
            prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))]
            body = {"prompt": prompt, "max_tokens": rng.randrange(1, 40), "stream": bool(index % 2)}
            async with gate:
                call = asyncio.create_task(site.complete("alpha" if index % 3 else "beta", **body))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.15)
                    call.cancel()
                try:
                    assert (await call).status_code == 200
                    ended["whole"] += 1
                except asyncio.CancelledError:
                    ended["left"] += 1

        await asyncio.gather(*(one(index) for index in range(1000)))
        await site.at_rest()
        assert ended["left"] > 150
        assert ended["whole"] > 600
        assert site.slots("alpha") == site.slots("beta") == 0
        assert len(settlements.usages) <= 1000
        assert site.dispatcher.workers[0].incarnation == 1
        assert (await site.complete()).status_code == 200


async def test_leaving_right_after_the_last_chunk_is_a_success(start: Start) -> None:
    """security 67: what was delivered is not a disconnect."""
    async with start() as site:
        for _ in range(10):
            async with site.stream(max_tokens=3) as response:
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        break
        await site.at_rest()
        assert await site.metric('forebay_requests_total{class="interactive",model="echo",outcome="ok"') == 10
        assert await site.metric("forebay_client_disconnects_total") == 0


# -- workers that go ------------------------------------------------------------------------------------------------


def _kill(site: Site) -> None:
    hello = site.dispatcher.workers[0].hello
    assert hello is not None
    os.kill(hello.pid, signal.SIGKILL)


async def test_a_worker_lost_after_the_first_byte_ends_the_stream_in_band(start: Start) -> None:
    """gateway C5, C7, security 77: an error event, no finish reason made up, no second run, partial usage settled; the
    connection can be used again."""
    async with (
        start(limits(tokens_per_minute=100000), echo=SLOW) as site,
        httpx.AsyncClient(base_url=site.url, headers={"authorization": f"Bearer {token('alpha')}"}, timeout=30) as kept,
    ):
        settlements = Settlements(site)
        said: list[Any] = []
        body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 1000, "stream": True}
        async with kept.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            port = response.extensions["network_stream"].get_extra_info("client_addr")
            async for line in response.aiter_lines():
                said.extend(events(line))
                if len(said) == 20 and line:
                    _kill(site)
        assert said[-1]["error"]["code"] == "worker_lost"
        assert "[DONE]" not in said
        assert all(event["choices"][0]["finish_reason"] is None for event in said[:-1])
        (usage,) = settlements.usages
        assert usage.prompt == 4
        assert 10 <= usage.output < 200
        again = await kept.get("/v1/models")
        assert again.status_code == 200
        assert again.extensions["network_stream"].get_extra_info("client_addr") == port
        await until(lambda: site.dispatcher.ready == 1, "a new worker")
        assert (await site.complete()).status_code == 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_worker_lost_before_the_first_byte_costs_a_retry(start: Start, stream: bool) -> None:
    """gateway C5, security 77: retried once, elsewhere or later, billed once."""
    changes = {**limits(tokens_per_minute=100000), "models": [pool(max_step_tokens=16)]}
    async with start(changes, echo=Echo(step_s=0.02)) as site:
        settlements = Settlements(site)
        call = asyncio.create_task(site.complete(prompt=[5 + i % 250 for i in range(320)], max_tokens=4, stream=stream))
        await until(lambda: site.dispatcher.workers and site.dispatcher.workers[0].stats.used_blocks > 3, "prefill")
        _kill(site)
        answer = await call
        assert answer.status_code == 200
        (usage,) = settlements.usages
        assert (usage.prompt + usage.cached, usage.output) == (320, 4)
        await site.at_rest()


async def test_a_request_that_kills_workers_is_quarantined_and_alone(start: Start) -> None:
    """security 59: two workers lost at most; then refused from memory; what ran beside it is unharmed."""
    changes = {"models": [pool(max_running=4)]}
    async with start(changes, echo=Echo(step_s=0.01, poison=77)) as site:
        good = [asyncio.create_task(site.complete(prompt=[5, 6, i], max_tokens=40)) for i in range(8)]
        poison = asyncio.create_task(site.complete("beta", prompt=[5, 77, 6]))
        refused = await poison
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "quarantined"
        assert refused.headers["x-should-retry"] == "false"
        assert {answer.status_code for answer in await asyncio.gather(*good)} == {200}
        lost = site.dispatcher.workers[0].incarnation - 1 if site.dispatcher.workers else 2
        assert lost <= 2
        again = await site.complete("beta", prompt=[5, 77, 6])
        assert again.json()["error"]["code"] == "quarantined"
        assert (await site.complete("beta", prompt=[5, 78, 6])).status_code == 200
        assert site.dispatcher.workers[0].incarnation - 1 <= 2
        await site.at_rest()


async def test_a_worker_that_refuses_everything_gives_503_in_the_end(start: Start) -> None:
    """gateway C11, E5: handed back a few times, then 503 as a status, streamed too; probes are few afterwards."""
    async with start({}, echo=Echo(fail_with="overloaded")) as site:
        answer = await site.complete(stream=True)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "worker_overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        assert site.dispatcher.queue.running == site.dispatcher.in_flight == 0


# -- observers and stops --------------------------------------------------------------------------------------------


async def test_observers_hear_each_transition_and_a_broken_one_costs_nothing(start: Start) -> None:
    heard: list[JobEvent] = []

    class Observer:
        @hookimpl
        def forebay_job_event(self, event: JobEvent) -> None:
            heard.append(event)

    class BrokenObserver:
        @hookimpl
        def forebay_job_event(self, event: JobEvent) -> None:
            raise RuntimeError

    async with start({}, plugins=[Observer(), BrokenObserver()]) as site:
        assert (await site.complete(max_tokens=3)).status_code == 200
        assert await site.metric("forebay_isolated_faults_total") == len(heard)
    assert [event.transition for event in heard] == [
        Transition.ADMITTED,
        Transition.QUEUED,
        Transition.DISPATCHED,
        Transition.FIRST_TOKEN,
        Transition.FINISHED,
    ]
    assert heard[-1].outcome == "ok"
    assert heard[-1].usage == Usage(prompt=4, output=3)


async def test_a_slow_observer_is_set_aside(start: Start) -> None:
    """DESIGN §4: it runs on the event loop, so one that overruns its budget is skipped and counted."""
    heard: list[Transition] = []

    class Slow:
        @hookimpl
        def forebay_job_event(self, event: JobEvent) -> None:
            heard.append(event.transition)
            time.sleep(0.06)

    async with start({}, plugins=[Slow()]) as site:
        assert (await site.complete()).status_code == 200
        assert await site.metric('forebay_isolated_faults_total{part="observer"}') == 1
    assert heard == [Transition.ADMITTED]


async def test_a_drain_lets_streams_end_and_takes_nothing_new(start: Start) -> None:
    """security 83: not ready at once, running streams complete, new requests get 503, all is settled."""
    changes = {"models": [pool(max_running=64)], "timeouts": {"drain_s": 30}}
    async with start(changes, echo=Echo(step_s=0.1)) as site:
        settlements = Settlements(site)

        async def one() -> list[Any]:
            async with site.stream(max_tokens=20) as response:
                return events((await response.aread()).decode())

        streams = [asyncio.create_task(one()) for _ in range(50)]
        await until(lambda: site.dispatcher.queue.running == 50, "fifty streams")
        drain = asyncio.create_task(site.gateway.drain())
        await asyncio.sleep(0)
        assert (await site.http.get("/readyz")).json() == {"status": "draining"}
        late = await site.complete()
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "shutting_down"
        assert all(said[-1] == "[DONE]" for said in await asyncio.gather(*streams))
        await asyncio.wait_for(drain, 30)
        assert len([usage for usage in settlements.usages if usage.output]) == 50


async def test_what_outlasts_the_drain_is_told_so(start: Start) -> None:
    """security 83: after drain_s the rest gets an error event, or 503, and is settled."""
    changes = {"models": [pool(max_running=2)], "timeouts": {"drain_s": 0.3}}
    async with start(changes, echo=Echo(step_s=0.02)) as site:
        settlements = Settlements(site)

        async def one() -> httpx.Response:
            return await site.complete(max_tokens=2000, stream=True)

        calls = [asyncio.create_task(one()) for _ in range(6)]
        await until(lambda: site.dispatcher.queue.running == 2 + MAX_WAITING, "full")
        await until(lambda: len(tickets(site)) == 6, "all are in")
        await until(lambda: sum(t.committed for t in tickets(site)) == 2, "two stream")
        await asyncio.wait_for(site.gateway.drain(), 30)
        answers = await asyncio.gather(*calls)
        streamed = [events(answer.text)[-1] for answer in answers if answer.status_code == 200]
        refused = [answer.json() for answer in answers if answer.status_code == 503]
        assert len(streamed) == 2
        assert len(refused) == 4
        assert {said["error"]["code"] for said in [*streamed, *refused]} == {"shutting_down"}
        assert len(settlements.usages) == 6
        assert site.gateway.parts.pipeline.active == 0
