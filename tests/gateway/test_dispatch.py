"""Dispatch against real workers: order, shares, late binding, expiry, labels, swaps."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from gateway.gate import MAX_WAITING
from gateway.settings import PolicyUse
from policies.spi import NoConfig, PolicySpec, hookimpl
from policies.types import Job, JobEvent, RouteDecision, TenantId, Transition
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, held, pool, until
from tests.gateway.tiny_tokenizer import tiny_tokenizer
from workers.protocol import StepOutputs
from workers.testing import Echo

OPEN = {"admission": {"use": "open"}, "quota": {"use": "unlimited"}}


class Samples:
    """Every report of every worker, as the dispatcher gets it."""

    def __init__(self, site: Site) -> None:
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.queued: list[int] = []
        self.steps: list[int] = []
        landing = site.dispatcher._landing
        outputs = landing.outputs

        def watched(handle: Any, message: StepOutputs) -> None:
            self.waiting.append(message.stats.waiting)
            self.running.append(message.stats.running)
            self.queued.append(len(site.dispatcher.queue))
            self.steps.append(message.step)
            outputs(handle, message)

        landing.outputs = watched  # type: ignore[method-assign]


async def backlog(site: Site, tenants: dict[str, int], **body: Any) -> list[asyncio.Task[Any]]:
    """So many requests of each tenant: all of them are queued before the first is dispatched."""
    with held(site.dispatcher):
        calls = [
            asyncio.create_task(site.complete(tenant, **body))
            for tenant, count in tenants.items()
            for _ in range(count)
        ]
        await until(lambda: len(site.dispatcher.queue) == len(calls), "all are queued")
    return calls


async def drop(calls: list[asyncio.Task[Any]]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_only_what_a_turn_leaves_over_is_a_backlog(start: Start) -> None:
    async with start({"policies": OPEN, "models": [pool(max_running=1)]}, echo=Echo(step_s=0.01)) as site:
        queue = site.dispatcher.queue
        assert (await site.complete()).status_code == 200
        assert not queue.left_over
        calls = await backlog(site, {"alpha": 4}, max_tokens=20)
        await until(lambda: queue.left_over and queue.running, "the others wait for the first")
        await asyncio.gather(*calls)
        assert not queue.left_over


async def shares(start: Start, scheduling: str) -> float:
    """Light's part of the tokens served while light (weight 1) and heavy (weight 3) are both backlogged."""
    changes = {
        "models": [pool(max_running=4)],
        "policies": {**OPEN, "scheduling": {"use": scheduling}},
        "tenants": [{"id": "light", "weight": 1}, {"id": "heavy", "weight": 3}],
    }
    async with start(changes, echo=Echo(step_s=0.002)) as site:
        samples = Samples(site)
        calls = await backlog(site, {"light": 130, "heavy": 130}, prompt=[5] * 16, max_tokens=16)
        served = site.dispatcher.queue.served
        await until(lambda: sum(served().values()) > 3000, "3,000 tokens")
        got, line = dict(served()), site.dispatcher.queue.backlog()
        assert set(line) == {TenantId("light"), TenantId("heavy")}, "both must still be backlogged"
        assert max(samples.waiting) <= MAX_WAITING
        await drop(calls)
    return got[TenantId("light")] / sum(got.values())


async def test_vtc_serves_by_weight(start: Start) -> None:
    """issue 2: weights 1:3, both backlogged: shares within 5 % of the weights, the engine's own line two at most."""
    assert await shares(start, "vtc") == pytest.approx(0.25, rel=0.05)


async def test_fcfs_does_not(start: Start) -> None:
    """issue 2: the same load under fcfs goes by arrival, so that the other test proves something."""
    assert abs(await shares(start, "fcfs") - 0.25) > 0.15


@pytest.mark.parametrize("prompt", [4, 200], ids=["short prompts", "long prompts"])
async def test_the_backlog_stays_here(start: Start, prompt: int) -> None:
    """engine J1, issue 2: flooded, the engine's own line is never longer than allowed, and its slots are full."""
    changes = {"models": [pool(max_running=8, max_step_tokens=64, blocks=400)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.005)) as site:
        samples = Samples(site)
        calls = await backlog(site, {"alpha": 90}, prompt=[5] * prompt, max_tokens=20)
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {200}
    assert max(samples.waiting) <= MAX_WAITING
    assert max(samples.queued) > 50
    assert max(samples.running) == 8


async def test_scarce_blocks_keep_the_backlog_here_too(start: Start) -> None:
    """engine J1: when blocks and not slots are the limit, jobs wait here, not in the engine.

    One more than by slots: running jobs take blocks while a report of the free ones is on its way.
    """
    changes = {"models": [pool(max_running=32, blocks=24)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.003)) as site:
        samples = Samples(site)
        calls = await backlog(site, {"alpha": 60}, prompt=[5] * 56, max_tokens=8)  # four blocks each, to the end
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        await site.at_rest()
    assert max(samples.waiting) <= MAX_WAITING + 1


async def test_no_slot_stays_empty_while_jobs_wait(start: Start) -> None:
    """gateway B7: work-conserving: 40 answers of 10 tokens on 4 slots take hardly more than the 100 steps they must."""
    changes = {"models": [pool(max_running=4)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.03)) as site:  # a gateway that waits for a core costs no step
        samples = Samples(site)
        calls = await backlog(site, {"alpha": 40}, max_tokens=10)
        await asyncio.gather(*calls)
    assert 100 <= max(samples.steps) <= 115


async def test_a_flood_does_not_starve_a_trickle(start: Start) -> None:
    """gateway B1: A floods, B asks now and then; B waits about as long as one request takes, A is not refused."""
    changes = {
        "models": [pool(max_running=4)],
        "policies": {**OPEN, "scheduling": {"use": "vtc"}},
    }
    async with start(changes, echo=Echo(step_s=0.005)) as site:
        flood = await backlog(site, {"alpha": 100}, max_tokens=20)
        for _ in range(5):
            behind = len(site.dispatcher.queue)
            answer = await site.complete("beta", max_tokens=2)
            assert answer.status_code == 200
            # What was served before it: those that ran already, and at most one round of the others.
            assert behind - len(site.dispatcher.queue) <= 12
            await asyncio.sleep(0.01)
        assert {answer.status_code for answer in await asyncio.gather(*flood)} == {200}


async def test_stale_figures_are_reported_and_stop_nothing(start: Start) -> None:
    """gateway B5, B7: without reports the in-flight count alone gates; dispatch goes on and the counter shows it."""
    async with start({"policies": OPEN}) as site:
        handle = site.dispatcher.workers[0]
        handle._stale_after_s = -1.0
        assert {(await site.complete()).status_code for _ in range(3)} == {200}
        assert await site.metric("forebay_stale_worker_dispatches_total") == 3


async def test_jobs_go_only_to_workers_with_their_labels(start: Start) -> None:
    two = pool()
    two["pools"] = [
        {**two["pools"][0], "name": "plain"},
        {**two["pools"][0], "name": "fast", "labels": {"hardware": "fast"}},
    ]
    changes = {
        "models": [two],
        "policies": OPEN,
        "tenants": [
            {"id": "alpha", "requires": {"hardware": "fast"}},
            {"id": "beta", "requires": {"hardware": "faster"}},
        ],
    }
    async with start(changes, echo=Echo(step_s=0.01)) as site:
        await until(lambda: site.dispatcher.ready == 2, "both pools")
        calls = [asyncio.create_task(site.complete(max_tokens=80)) for _ in range(12)]
        await until(lambda: site.dispatcher.in_flight > 4, "they run")
        inflight = {handle.pool: handle.inflight for handle in site.dispatcher.workers}
        assert inflight["plain"] == 0
        assert inflight["fast"] > 4
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        nowhere = await site.complete("beta")
        assert nowhere.status_code == 403
        assert nowhere.json()["error"]["code"] == "requirement_not_met"


async def test_load_is_spread_over_equal_workers(start: Start) -> None:
    """gateway E7: dispatches of one turn see each other."""
    changes = {"models": [pool(count=2, max_running=8)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.01)) as site:
        await until(lambda: site.dispatcher.ready == 2, "two workers")
        calls = [asyncio.create_task(site.complete(max_tokens=600)) for _ in range(8)]
        await until(lambda: site.dispatcher.in_flight == 8, "all run")
        counts = sorted(handle.inflight for handle in site.dispatcher.workers)
        assert counts == [4, 4]
        await drop(calls)


class _Lost:
    def choose(self, job: Any, workers: Any, now: float) -> RouteDecision:
        return RouteDecision("nobody", "load")


async def test_a_routing_policy_that_names_nobody_costs_nothing(start: Start) -> None:
    spec = PolicySpec("routing", "lost", NoConfig, lambda config, ctx: _Lost(), "Names nobody.")
    async with start({"policies": {**OPEN, "routing": {"use": "lost"}}}, policies=[spec]) as site:
        assert (await site.complete()).status_code == 200
        assert await site.metric('forebay_isolated_faults_total{part="routing"}') == 1


async def test_a_wide_job_is_not_overtaken_for_ever(start: Start) -> None:
    """A job of four choices needs four slots at once; a stream of small ones of others must not starve it."""
    changes = {"models": [pool(max_running=4)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.002)) as site:
        rng = random.Random(3)
        stop = asyncio.Event()

        async def trickle() -> None:
            while not stop.is_set():
                await site.complete("beta", max_tokens=rng.randrange(3, 12))

        small = [asyncio.create_task(trickle()) for _ in range(12)]
        await until(lambda: site.dispatcher.in_flight >= 4, "busy")
        async with asyncio.timeout(30):
            answer = await site.complete("alpha", n=4, max_tokens=4)
        assert answer.status_code == 200
        stop.set()
        await asyncio.gather(*small)
        await site.at_rest()


async def test_more_choices_than_slots_still_run(start: Start) -> None:
    """The engine runs them in turns; the gateway must not wait for a room that never comes."""
    async with start({"models": [pool(max_running=2)], "policies": OPEN}) as site:
        answer = await site.complete(n=8, max_tokens=3)
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 8
        await site.at_rest()


async def test_a_swap_keeps_every_queued_job(start: Start) -> None:
    """DESIGN §4: the policy changes under a backlog; nothing is lost, refused or run twice."""
    changes = {"models": [pool(max_running=2)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.005)) as site:
        calls = await backlog(site, {"alpha": 30, "beta": 30}, max_tokens=4)
        assert len(site.dispatcher.queue) == 60
        for use in ("vtc", "fcfs", "vtc"):
            current = await site.gateway.parts.runtime.swap({"scheduling": PolicyUse(use=use)})
            assert site.dispatcher.snapshot()["policy"] == use
        assert current.generation == 4
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["id"] for answer in answers}) == 60
        assert sum(site.dispatcher.queue.served().values()) == 60 * (4 + 4)
        await site.at_rest()


async def test_a_choice_that_a_stop_string_ended_stops_in_the_engine(start: Start) -> None:
    """Two choices, one meets its stop string early: the engine lets go of it at once and goes on with the other."""
    async with start({"policies": OPEN}, echo=Echo(step_s=0.02, shift=8)) as site:
        ends: list[tuple[int, str | None, int]] = []
        outputs = site.dispatcher._landing.outputs

        def watched(handle: Any, message: StepOutputs) -> None:
            ends.extend((o.index, o.finish, o.output_tokens) for o in message.outputs if o.finish is not None)
            outputs(handle, message)

        site.dispatcher._landing.outputs = watched  # type: ignore[method-assign]
        prompt = [60] * 100
        prompt[2] = 40
        stop = tiny_tokenizer().token_bytes(40).decode()
        answer = await site.complete(prompt=prompt, n=2, max_tokens=80, stop=[stop])
        assert answer.status_code == 200
        reasons = {choice["index"]: choice["finish_reason"] for choice in answer.json()["choices"]}
        assert reasons == {0: "stop", 1: "length"}
        (first, finish, produced), last = ends
        assert (first, finish) == (0, "cancelled")
        assert produced < 40, "it did not run on beside the other"
        assert last == (1, "length", 80)
        assert answer.json()["usage"]["completion_tokens"] == 3 + 80
        await site.at_rest()


async def test_the_slots_of_ended_choices_are_given_to_others(start: Start) -> None:
    """A request of four choices, three of them over, occupies one slot and not four."""
    changes = {"models": [pool(max_running=4)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.01, shift=8)) as site:
        prompt = [40 if i in (2, 10, 18) else 60 for i in range(300)]  # the fourth meets it after 278 tokens
        text = tiny_tokenizer().token_bytes(40).decode()
        wide = asyncio.create_task(site.complete(prompt=prompt, n=4, max_tokens=250, stop=[text]))
        flights = site.dispatcher._desk.flights
        await until(lambda: len(flights) == 1 and len(next(iter(flights)).open) == 1, "three choices are over")
        others = [asyncio.create_task(site.complete(max_tokens=300)) for _ in range(3)]
        handle = site.dispatcher.workers[0]
        await until(lambda: handle.stats.running == 4, "all four slots are used")
        assert handle.stats.waiting == 0
        await drop([wide, *others])


async def test_a_long_prompt_is_not_locked_out_by_short_ones(start: Start) -> None:
    """issue 4: it needs most of the blocks at once; a stream of short ones, who always fit, does not starve it."""
    changes = {"models": [pool(max_running=16, blocks=40)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.002)) as site:
        stop = asyncio.Event()

        async def trickle(number: int) -> None:
            while not stop.is_set():
                answer = await site.complete("beta", prompt=[5 + number] * 40, max_tokens=30)
                assert answer.status_code == 200

        short = [asyncio.create_task(trickle(number)) for number in range(10)]
        await until(lambda: site.dispatcher.in_flight >= 8, "busy")
        async with asyncio.timeout(30):
            answer = await site.complete("alpha", prompt=[9] * 560, max_tokens=4)
        assert answer.status_code == 200
        stop.set()
        await asyncio.gather(*short)
        await site.at_rest()


class Noted:
    """An observer that keeps the jobs it hears of."""

    def __init__(self) -> None:
        self.ran: list[tuple[Job, str | None]] = []

    @hookimpl
    def forebay_job_event(self, event: JobEvent) -> None:
        if event.transition is Transition.DISPATCHED:
            self.ran.append((event.job, event.worker))


async def test_a_class_is_lowered_never_raised_and_runs_in_its_own_pool(start: Start) -> None:
    """issue 4: a caller may lower its class and loosen its deadline; bulk work stays out of the other pool."""
    two = pool()
    two["pools"] = [
        {**two["pools"][0], "name": "fast", "classes": ["interactive"]},
        {**two["pools"][0], "name": "bulk", "classes": ["batch"]},
    ]
    changes = {
        "models": [two],
        "policies": OPEN,
        "tenants": [{"id": "alpha", "class": "interactive"}, {"id": "beta", "class": "batch"}],
    }
    noted = Noted()
    async with start(changes, plugins=[noted]) as site:
        await until(lambda: site.dispatcher.ready == 2, "both pools")
        asked: list[tuple[str, dict[str, str]]] = [
            ("alpha", {}),
            ("alpha", {"x-forebay-class": "batch"}),
            ("beta", {}),
            ("beta", {"x-forebay-class": "interactive", "x-forebay-priority": "9"}),
            ("beta", {"x-forebay-deadline-ms": "1"}),
            ("beta", {"x-forebay-deadline-ms": "90000"}),
        ]
        for tenant, headers in asked:
            assert (await site.complete(tenant, headers=headers)).status_code == 200
        seen = [
            (
                job.service_class,
                job.priority,
                str(worker).split("/")[1][:4],
                round((job.deadline or 0) - job.arrived_at),
            )
            for job, worker in noted.ran
        ]
        assert seen == [
            ("interactive", 1, "fast", 30),
            ("batch", 0, "bulk", 60),
            ("batch", 0, "bulk", 60),
            ("batch", 0, "bulk", 60),
            ("batch", 0, "bulk", 60),
            ("batch", 0, "bulk", 90),
        ]


async def test_the_admin_view_of_the_queue(start: Start) -> None:
    changes = {"models": [pool(max_running=1)], "policies": OPEN}
    async with start(changes, echo=Echo(step_s=0.02)) as site:
        calls = await backlog(site, {"alpha": 4 + MAX_WAITING}, max_tokens=500)
        await until(lambda: site.dispatcher.in_flight == 1 + MAX_WAITING, "full")
        view = site.dispatcher.snapshot(limit=2)
        assert (view["model"], view["queued"], view["running"], view["workers_ready"]) == (MODEL, 3, 1 + MAX_WAITING, 1)
        assert view["tenants"]["alpha"]["queued"] == 3
        assert len(view["jobs"]) == 2
        assert view["jobs"][0]["prompt_tokens"] == 4
        assert not site.dispatcher.stalled()
        assert await site.metric('forebay_queue_depth{class="interactive",tenant="alpha"}') == 3
        await drop(calls)
