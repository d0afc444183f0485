"""Scheduling policies that fail under live requests, and candidates in the shadow: no request ever notices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.dispatch import Dispatcher
from gateway.models import ModelHandle
from gateway.settings import Model, PolicyUse
from gateway.trial import Trial
from policies.guard import PROBATION_S
from policies.scheduling.fcfs import FcfsScheduler
from policies.scheduling.vtc import VtcConfig, VtcScheduler
from policies.spi import NoConfig, PolicySpec
from policies.testing import always, make_job
from policies.types import TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, events, held, pool, until
from tests.gateway.test_dispatch import OPEN, backlog
from tests.policies.faulty import WITHHOLDS, Faulty, FaultyError
from workers.testing import Echo


class Maker:
    """A policy ``faulty`` of which every instance is at hand."""

    def __init__(self) -> None:
        self.made: list[Faulty] = []
        self.notes: list[str] = []
        self.spec = PolicySpec("scheduling", "faulty", NoConfig, self._make, "Works until it is told to fail.")

    def _make(self, config: Any, ctx: Any) -> Faulty:
        policy = Closing(self.notes)
        self.made.append(policy)
        return policy


class Closing(Faulty):
    """With a lifecycle."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    async def start(self) -> None:
        self.notes.append("start")

    async def close(self) -> None:
        self.notes.append("close")


FAULTY = {"scheduling": {"use": "faulty"}}


async def policies(site: Site) -> dict[str, Any]:
    answer: dict[str, Any] = (await site.admin.get("/admin/policies")).json()
    return answer


@contextlib.asynccontextmanager
async def waiting(site: Site, tenants: dict[str, int]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """So many requests of each tenant, of which none is dispatched before the block ends."""
    with held(site.dispatcher):
        calls = [
            asyncio.create_task(site.complete(tenant, max_tokens=4))
            for tenant, count in tenants.items()
            for _ in range(count)
        ]
        await until(lambda: len(site.dispatcher.queue) == len(calls), "all are queued")
        yield calls


@pytest.mark.parametrize("way", ["pop raises", "push raises", "charge works and raises", "loses a job", "denies a job"])
async def test_a_policy_that_fails_in_its_first_second_is_rolled_back(start: Start, way: str) -> None:
    """issue 4: the queue is kept, every request is answered once, the books say what happened."""
    maker = Maker()
    changes = {"models": [pool(max_running=2)], "policies": {**OPEN, "scheduling": {"use": "vtc"}}}
    async with start(changes, echo=Echo(step_s=0.004), policies=[maker.spec]) as site:
        async with waiting(site, {"alpha": 20, "beta": 20}) as calls:
            gone = calls.pop(5)
            swapped = await site.admin.post("/admin/policies", json=FAULTY)
            assert (swapped.status_code, swapped.json()["generation"]) == (200, 2)
            maker.made[-1].way = way
            gone.cancel()  # a discard
            await until(lambda: len(site.dispatcher.queue) == len(calls), "it has left")
        late = asyncio.create_task(site.complete("beta", max_tokens=4))  # a push
        await until(lambda: site.gateway.parts.runtime.current.generation == 3, "rolled back")
        now = await policies(site)
        assert now["policies"]["scheduling"] == {"use": "vtc", "with": {}}
        assert now["fallbacks"] == {}
        assert site.dispatcher.snapshot()["policy"] == "vtc"
        answers = await asyncio.gather(*calls, late)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["id"] for answer in answers}) == 40
        assert await site.metric('forebay_isolated_faults_total{part="scheduling"}') == 1
        # The next one may be tried at once.
        again = await site.admin.post("/admin/policies", json={"scheduling": {"use": "drr"}})
        assert again.json()["generation"] == 4
        await site.at_rest()
    assert maker.notes == ["start", "close"]


async def test_a_policy_that_lets_nothing_run_is_rolled_back(start: Start) -> None:
    """issue 4: what ran meanwhile ends, nothing new begins, until the guard has seen a second of that."""
    maker = Maker()
    changes = {"models": [pool(max_running=2)], "policies": {**OPEN, "scheduling": {"use": "vtc"}}}
    async with start(changes, echo=Echo(step_s=0.004), policies=[maker.spec]) as site:
        async with waiting(site, {"alpha": 5, "beta": 5}) as calls:
            await site.admin.post("/admin/policies", json=FAULTY)
            maker.made[-1].way = WITHHOLDS
        await until(lambda: site.gateway.parts.runtime.current.generation == 3, "rolled back")
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        assert site.dispatcher.snapshot()["policy"] == "vtc"
        assert not site.dispatcher.stalled()


async def test_a_policy_that_fails_later_falls_back_to_fcfs_in_that_queue_alone(start: Start) -> None:
    maker = Maker()
    two = [pool(max_running=2), {**pool(), "name": "other"}]
    async with start({"models": two, "policies": {**OPEN, **FAULTY}}, policies=[maker.spec]) as site:
        assert (await site.complete()).status_code == 200
        failing = next(policy for policy in maker.made if policy is _raw(site.dispatcher))
        await asyncio.sleep(PROBATION_S + 0.05)
        calls = await backlog(site, {"alpha": 10}, max_tokens=4)
        failing.way = "pop raises"
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        now = await policies(site)
        assert now["policies"]["scheduling"]["use"] == "faulty", "as configured"
        assert now["fallbacks"] == {
            MODEL: {"failed": "faulty", "running": "fcfs", "call": "pop", "error": "FaultyError: pop"}
        }
        assert now["generation"] == 2
        assert site.dispatcher.snapshot()["policy"] == "fcfs"
        other = site.gateway.parts.dispatchers["other"]
        assert isinstance(_raw(other), Faulty)
        mended = await site.admin.post("/admin/policies", json=FAULTY)
        assert mended.json()["fallbacks"] == {}
        assert (await site.complete()).status_code == 200
        assert site.dispatcher.snapshot()["policy"] == "faulty"
        await _fails_in_the_middle_of_a_stream(site)
    assert maker.notes.count("start") == maker.notes.count("close") == 4


async def _fails_in_the_middle_of_a_stream(site: Site) -> None:
    """gateway C7: its reader has everything all the same, and an end."""
    said: list[Any] = []
    async with site.stream(max_tokens=300, ignore_eos=True) as response:
        async for line in response.aiter_lines():
            said += events(line)
            if len(said) == 5 and line:
                _raw(site.dispatcher).way = "charge raises"
    assert said[-1] == "[DONE]"
    assert said[-2]["choices"][0]["finish_reason"] == "length"
    assert not [event for event in said[:-1] if "error" in event]
    assert site.dispatcher.snapshot()["policy"] == "faulty" or (await policies(site))["fallbacks"]


def _raw(dispatcher: Dispatcher) -> Any:
    return dispatcher.scheduling[1].wrapped  # type: ignore[attr-defined]


async def test_a_rollback_concerns_every_model(start: Start) -> None:
    """A swap is one decision: a policy that failed at one model is not kept at the others."""
    maker = Maker()
    two = [pool(max_running=2), {**pool(), "name": "other"}]
    async with start(
        {"models": two, "policies": {**OPEN, "scheduling": {"use": "vtc"}}}, policies=[maker.spec]
    ) as site:
        await site.admin.post("/admin/policies", json=FAULTY)
        for policy in maker.made:
            policy.way = "pop raises"
        answers = await asyncio.gather(site.complete(), site.complete(model="other"))
        assert {answer.status_code for answer in answers} == {200}
        await until(lambda: site.gateway.parts.runtime.current.generation > 2, "rolled back")
        await asyncio.sleep(0.05)
        assert (await policies(site))["generation"] == 3, "once"
        for dispatcher in site.gateway.parts.dispatchers.values():
            assert dispatcher.snapshot()["policy"] == "vtc"
    assert sorted(maker.notes) == ["close", "close", "start", "start"]


async def test_a_policy_that_cannot_say_what_it_counted_can_be_swapped_out(start: Start) -> None:
    maker = Maker()
    async with start({"policies": {**OPEN, **FAULTY}}, policies=[maker.spec]) as site:
        maker.made[0].way = "dump raises"
        answer = await site.admin.post("/admin/policies", json={"scheduling": {"use": "vtc"}})
        assert answer.status_code == 200
        assert (await site.complete()).status_code == 200


# -- in the shadow ----------------------------------------------------------------------------------------------------


async def test_a_candidate_watches_and_takes_over(start: Start) -> None:
    """issue 4: fed the same events, counted against the live one for N seconds, then switched; visible meanwhile."""
    changes = {"models": [pool(max_running=2)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.004)) as site:
        async with waiting(site, {"alpha": 40, "beta": 40}) as calls:
            begun = await site.admin.post(
                "/admin/policies", json={"scheduling": {"use": "vtc", "with": {"output_cost": 3}}, "shadow_s": 2}
            )
        assert begun.status_code == 202
        assert begun.json()["policies"]["scheduling"]["use"] == "fcfs"
        assert begun.json()["shadow"]["state"] == "running"
        while not (await policies(site))["shadow"]["models"][MODEL]["picks"]:
            await asyncio.sleep(0.01)
        assert site.dispatcher.snapshot()["policy"] == "fcfs"
        await until(lambda: site.gateway.parts.runtime.current.generation == 2, "the switch")
        after = await policies(site)
        assert after["policies"]["scheduling"] == {"use": "vtc", "with": {"output_cost": 3}}
        assert (after["shadow"]["state"], after["shadow"]["use"]) == ("switched", "vtc")
        counts = after["shadow"]["models"][MODEL]
        assert counts["picks"] == sum(tenant["live"] for tenant in counts["tenants"].values())
        assert counts["candidate_idle"] == 0
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        await site.at_rest()


async def test_a_candidate_that_raises_is_discarded(start: Start) -> None:
    maker = Maker()
    changes = {"models": [pool(max_running=2)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.004), policies=[maker.spec]) as site:
        async with waiting(site, {"alpha": 20}) as calls:
            await site.admin.post("/admin/policies", json={**FAULTY, "shadow_s": 20})
            maker.made[-1].way = "pop raises"
        await until(lambda: not _trial(site).running, "noticed")
        now = await policies(site)
        assert now["shadow"]["state"] == "discarded"
        assert now["shadow"]["reason"] == f"{MODEL}: FaultyError: pop"
        assert (now["generation"], now["policies"]["scheduling"]["use"]) == (1, "fcfs")
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        assert await site.metric("forebay_isolated_faults_total") == 0, "the live policy is well"
        refused = await site.admin.post("/admin/policies", json={"scheduling": {"use": "nope"}, "shadow_s": 1})
        assert refused.status_code == 400
    assert maker.notes == ["start", "close"]


def _trial(site: Site) -> Trial:
    trial = site.gateway.parts.runtime.trial
    assert trial is not None
    return trial


async def test_what_ends_a_shadow_run(start: Start) -> None:
    """The operator, another swap, another candidate, the failure of the live policy; but no swap of another kind."""
    maker = Maker()
    async with start({"policies": {**OPEN, **FAULTY}}, policies=[maker.spec]) as site:
        post = site.admin.post
        shadow = {"scheduling": {"use": "vtc"}, "shadow_s": 60}
        assert (await post("/admin/policies", json={"shadow_s": 0})).status_code == 409
        await post("/admin/policies", json=shadow)
        first = _trial(site)
        await post("/admin/policies", json={"routing": {"use": "round_robin"}})
        assert first.running
        await post("/admin/policies", json={**shadow, "scheduling": {"use": "drr"}})
        assert (first.state, first.reason) == ("cancelled", "another trial began")
        second = _trial(site)
        ended = await post("/admin/policies", json={"shadow_s": 0})
        assert (ended.json()["shadow"]["state"], second.reason) == ("cancelled", "the operator ended it")
        await post("/admin/policies", json=shadow)
        third = _trial(site)
        maker.made[0].way = "pop raises"
        assert (await site.complete()).status_code == 200
        await until(lambda: not third.running, "the live policy failed")
        assert third.reason == "the live policy failed"
        await post("/admin/policies", json=shadow)
        swapped = await post("/admin/policies", json={"scheduling": {"use": "wfq"}})
        assert swapped.json()["shadow"]["reason"] == "another scheduling policy was swapped in"
        await post("/admin/policies", json=shadow)
        assert (await site.complete()).status_code == 200
        assert _trial(site).running, "and the end of the gateway ends it"


@pytest.mark.parametrize(
    "body",
    [
        {"scheduling": {"use": "vtc"}, "shadow_s": -1},
        {"scheduling": {"use": "vtc"}, "shadow_s": "10"},
        {"scheduling": {"use": "vtc"}, "shadow_s": True},
        {"scheduling": {"use": "vtc"}, "shadow_s": 1e9},
        {"scheduling": {"use": "vtc"}, "shadow_s": 0},
        {"scheduling": {"use": "vtc"}, "routing": {"use": "round_robin"}, "shadow_s": 5},
        {"routing": {"use": "round_robin"}, "shadow_s": 5},
        {"shadow_s": 5},
    ],
)
async def test_a_shadow_run_that_makes_no_sense_is_refused(body: dict[str, Any], start: Start) -> None:
    async with start(ready=False) as site:
        answer = await site.admin.post("/admin/policies", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "shadow_s"
        assert (await policies(site))["shadow"] is None


# -- ten thousand -----------------------------------------------------------------------------------------------------


def crowded(policy: Any, jobs: int = 10_000) -> Dispatcher:
    """A dispatcher without workers, with so many queued jobs of 100 tenants."""
    model = Model.model_validate({"name": "m", "source": "x", "pools": [{"name": "p"}]})
    dispatcher = Dispatcher(ModelHandle(model), policy, "first", lambda: None)  # type: ignore[arg-type, return-value]
    for i in range(jobs):
        dispatcher.queue.offer(make_job(f"j{i:05}", f"t{i % 100}"), 0.0)
    return dispatcher


@pytest.mark.parametrize("how", ["swap", "rollback", "fallback"])
async def test_ten_thousand_jobs_move(how: str) -> None:
    """issue 4: nothing lost, duplicated or reordered within a tenant, whatever made them move."""
    dispatcher = crowded(VtcScheduler(VtcConfig().tariff()))
    faulty = Faulty()
    dispatcher.swap(faulty, "second", probation=how != "fallback")
    if how != "swap":
        faulty.way = "pop raises"
    seen: dict[TenantId, list[str]] = {}
    while (dispatch := dispatcher.queue.next(1.0, always)) is not None:
        seen.setdefault(dispatch.job.tenant, []).append(dispatch.job.id)
    assert sum(map(len, seen.values())) == 10_000
    assert all(line == sorted(set(line)) for line in seen.values())
    assert dispatcher.scheduling[0] == {"swap": "second", "rollback": "first", "fallback": "fcfs"}[how]
    dispatcher.abort()


async def test_a_swap_that_fails_on_the_way_leaves_ten_thousand_jobs_where_they_were() -> None:
    dispatcher = crowded(FcfsScheduler())
    with pytest.raises(FaultyError):
        dispatcher.swap(Faulty("push raises"), "second")
    assert dispatcher.scheduling[0] == "first"
    assert len(dispatcher.queue) == len(dispatcher.scheduling[1]) == 10_000
    dispatcher.abort()


async def test_swaps_while_requests_come_and_go(start: Start) -> None:
    """Every policy in turn under a live load of two tenants: each request is answered exactly once."""
    changes = {"models": [pool(max_running=4)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.001)) as site:
        calls = await backlog(site, {"alpha": 60, "beta": 60}, max_tokens=4)
        for use in ("vtc", "wfq", "drr", "locality", "priority", "edf", "sjf", "hierarchical", "fcfs", "vtc"):
            await site.gateway.parts.runtime.swap({"scheduling": PolicyUse(use=use)})
            calls.append(asyncio.create_task(site.complete("beta", max_tokens=4)))
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {200}
        assert sum(site.dispatcher.queue.served().values()) == len(answers) * (4 + 4)
        assert site.gateway.parts.runtime.current.fallbacks == {}
        await site.at_rest()
