"""Live policies: swaps under requests, carried state, failures that change nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.settings import PolicyUse
from policies.spi import NoConfig, PolicyConfigError, PolicySpec
from policies.types import Principal, TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import held, pool, until
from workers.testing import Echo


class LivePolicy:
    """An auth policy with a lifecycle that writes down what happens to it."""

    def __init__(self, notes: list[str], name: str, tenant: str = "alpha", fail: bool = False) -> None:
        self.notes, self.name, self.tenant, self.fail = notes, name, tenant, fail

    async def start(self) -> None:
        self.notes.append(f"start {self.name}")
        if self.fail:
            raise RuntimeError("cannot start")

    async def close(self) -> None:
        self.notes.append(f"close {self.name}")

    async def authenticate(self, request: Any) -> Principal:
        self.notes.append(f"use {self.name}")
        return Principal(TenantId(self.tenant), method=self.name)


def auth_specs(notes: list[str]) -> list[PolicySpec]:
    return [
        PolicySpec("auth", "first", NoConfig, lambda config, ctx: LivePolicy(notes, "first"), "One."),
        PolicySpec("auth", "second", NoConfig, lambda config, ctx: LivePolicy(notes, "second", "beta"), "Two."),
        PolicySpec("auth", "unstartable", NoConfig, lambda config, ctx: LivePolicy(notes, "third", fail=True), "No."),
    ]


async def test_a_swapped_policy_is_started_used_and_closed(start: Start) -> None:
    notes: list[str] = []
    async with start({"policies": {"auth": {"use": "first"}}}, policies=auth_specs(notes)) as site:
        runtime = site.gateway.parts.runtime
        await site.complete()
        current = await runtime.swap({"auth": PolicyUse(use="second")})
        assert current.generation == 2
        await site.complete()
        assert notes == ["start first", "use first", "start second", "use second"]
    assert notes[4:] == ["close first", "close second"]


async def test_a_policy_that_cannot_start_changes_nothing(start: Start) -> None:
    notes: list[str] = []
    async with start({"policies": {"auth": {"use": "first"}}}, policies=auth_specs(notes)) as site:
        runtime = site.gateway.parts.runtime
        before = runtime.current
        with pytest.raises(RuntimeError, match="cannot start"):
            await runtime.swap({"auth": PolicyUse(use="unstartable"), "scheduling": PolicyUse(use="vtc")})
        assert runtime.current is before
        assert site.dispatcher.snapshot()["policy"] == "fcfs"
        assert notes[-1] == "close third"
        assert (await site.complete()).status_code == 200


@pytest.mark.parametrize(
    ("use", "path"),
    [
        (PolicyUse(use="nope"), "use"),
        (PolicyUse.model_validate({"use": "vtc", "with": {"input_cots": 1}}), "with.input_cots"),
    ],
    ids=["unknown name", "unknown key"],
)
async def test_a_mistake_names_its_place_and_changes_nothing(start: Start, use: PolicyUse, path: str) -> None:
    async with start() as site:
        before = site.gateway.parts.runtime.current
        with pytest.raises(PolicyConfigError) as caught:
            await site.gateway.parts.runtime.swap({"scheduling": use})
        assert caught.value.path == path
        assert site.gateway.parts.runtime.current is before


class _Forgetful:
    """A scheduling policy that loses what it is given."""

    def push(self, job: Any, now: float) -> None: ...
    def pop(self, now: float, fits: Any) -> None: ...
    def requeue(self, job: Any, now: float, reason: Any) -> None: ...
    def discard(self, job_id: Any) -> bool:
        return False

    def charge(self, job: Any, charge: Any, now: float, final: bool) -> None: ...
    def drain(self) -> list[Any]:
        return []

    def dump(self) -> dict[str, Any]:
        return {}

    def load(self, state: Any) -> None: ...
    def explain(self, job: Any) -> None: ...
    def __len__(self) -> int:
        return 0


async def test_a_scheduler_that_loses_jobs_is_not_swapped_in_at_any_model(start: Start) -> None:
    """Two models: the second queue refuses, so the first goes back to what it had, with every job."""
    spec = PolicySpec("scheduling", "forgetful", NoConfig, lambda config, ctx: _Forgetful(), "Loses jobs.")
    two = [pool(max_running=1), {**pool(max_running=1), "name": "echo2"}]
    async with start({"models": two}, policies=[spec], echo=Echo(step_s=0.01)) as site:
        second = site.gateway.parts.dispatchers["echo2"]
        await until(lambda: second.ready, "the second model's worker")
        with held(second):
            calls = [asyncio.create_task(site.complete(model="echo2", max_tokens=10)) for _ in range(8)]
            await until(lambda: len(second.queue) == 8, "a backlog at the second model")
            with pytest.raises(RuntimeError, match="holds 0 of"):
                await site.gateway.parts.runtime.swap({"scheduling": PolicyUse(use="forgetful")})
            assert site.dispatcher.snapshot()["policy"] == second.snapshot()["policy"] == "fcfs"
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        assert (await site.complete()).status_code == 200


async def test_a_quota_swap_refills_nothing_and_loses_no_slot(start: Start) -> None:
    """DESIGN §4: buckets carry over, and a request that runs across the swap frees its slot in the new policy too."""
    changes = {"tenants": [{"id": "alpha", "limits": {"tokens_per_hour": 2000, "concurrent": 1}}]}
    async with start(changes, echo=Echo(step_s=0.01)) as site:
        runtime = site.gateway.parts.runtime
        async with site.stream(prompt=[5] * 100, max_tokens=150) as response:
            before = int(response.headers["x-ratelimit-remaining-tokens"])
            await runtime.swap({"quota": PolicyUse.model_validate({"use": "token_bucket", "with": {"lease_s": 60}})})
            assert site.slots("alpha") == 1
            refused = await site.complete()
            assert refused.json()["error"]["code"] == "concurrent"
            assert int(refused.headers["x-ratelimit-remaining-tokens"]) <= before + 40
            await response.aread()
        assert site.slots("alpha") == 0
        assert (await site.complete()).status_code == 200
        await site.at_rest()


async def test_a_request_keeps_the_policies_it_began_with(start: Start) -> None:
    """It is settled where it was reserved, though the live quota policy knows nothing of it."""
    async with start({}, echo=Echo(step_s=0.01)) as site:
        runtime = site.gateway.parts.runtime
        old = runtime.current.quota
        async with site.stream(max_tokens=150) as response:
            await runtime.swap({"quota": PolicyUse(use="unlimited")})
            assert old.concurrent(TenantId("alpha")) == 1  # type: ignore[attr-defined]
            await response.aread()
        assert old.concurrent(TenantId("alpha")) == 0  # type: ignore[attr-defined]
