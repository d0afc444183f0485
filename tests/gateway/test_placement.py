"""Labels, requirements and privacy: a filter before routing that nothing later gets around."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.gate import takes
from gateway.placement import Demand, demand, unmet
from gateway.settings import ServiceClass
from policies.spi import NoConfig, PolicySpec
from policies.testing import make_job
from policies.types import AdmissionDecision, Job, QueueSnapshot, WorkerView
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, pool, until
from workers.testing import Echo

EU, US = {"region": "eu"}, {"region": "us"}
GPU = {"region": "eu", "hardware": "gpu"}
OUT = {"region": "eu", "external": "true"}


@pytest.mark.parametrize(
    ("pools", "requires", "external", "missing"),
    [
        ([{}], {}, False, None),
        ([EU], EU, False, None),
        ([US, GPU], GPU, False, None),
        ([US], EU, False, "region=eu"),
        ([{}], GPU, False, "region=eu, hardware=gpu"),
        ([EU, {"hardware": "gpu"}], GPU, False, "region=eu, hardware=gpu together"),
        ([OUT], EU, False, "a pool inside this installation (privacy.allow_external is off)"),
        ([OUT], {}, False, "a pool inside this installation (privacy.allow_external is off)"),
        ([OUT], EU, True, None),
        ([OUT, US], EU, False, "a pool inside this installation (privacy.allow_external is off)"),
        ([OUT, US], {}, False, None),
        ([{"external": "false"}], {}, False, None),
    ],
)
def test_what_is_missing_is_named(pools: Any, requires: Any, external: bool, missing: str | None) -> None:
    assert unmet(pools, Demand(requires, external)) == missing
    jobs = make_job("x", requires=requires, allow_external=external)
    views = [WorkerView("w", "m", "p", max_running=1, labels=labels) for labels in pools]
    assert any(takes(view, jobs) for view in views) is (missing is None)


def test_tenant_and_class_both_require() -> None:
    strict = ServiceClass.model_validate({"requires": {"hardware": "gpu"}, "privacy": {"allow_external": False}})
    both = demand(EU, True, strict)
    assert (both.requires, both.allow_external) == (GPU, False)
    assert demand(EU, True, ServiceClass()).allow_external
    contradiction = demand(EU, True, ServiceClass.model_validate({"requires": US}))
    assert unmet([EU, US, {}], contradiction) == "region, for which tenant and class require different values"


class Full:
    """Every queue but that of ``outside`` is full."""

    def check(self, job: Job, queue: QueueSnapshot, now: float) -> AdmissionDecision:
        if job.model == "outside":
            return AdmissionDecision(True)
        return AdmissionDecision(False, "queue_full", 1.0, fallback_model="outside")


FULL = PolicySpec("admission", "full", NoConfig, lambda config, context: Full(), "Every queue is full.")


def models(*pools: dict[str, Any], name: str = MODEL) -> dict[str, Any]:
    base = pool()
    made = [{**base["pools"][0], "name": f"p{i}", **fields} for i, fields in enumerate(pools)]
    return {**base, "name": name, "pools": made}


def workers_of(site: Site, tenant: str = "alpha") -> set[str | None]:
    ended = [one.summary for one in site.gateway.parts.recent.slowest(100, 600)]
    return {summary.worker for summary in ended if summary.tenant == tenant}


async def refusal(site: Site, tenant: str = "alpha", **body: Any) -> tuple[int, str, str]:
    answer = await site.complete(tenant, **body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def test_no_pool_is_403_with_the_requirement_and_one_that_is_down_is_503(start: Start) -> None:
    tenants = [{"id": "alpha", "requires": EU}, {"id": "beta", "requires": {"region": "mars"}}, {"id": "gamma"}]
    down = {"launch": {"use": "static", "addresses": ["unix:/nowhere"]}, "labels": EU}
    classes = {"interactive": {"max_wait_s": 0.5}}
    changes = {"tenants": tenants, "classes": classes, "models": [models({"labels": US}, down)]}
    async with start(changes, ready=False) as site:
        await until(lambda: site.dispatcher.ready and site.dispatcher.model.loaded, "one pool is up")
        status, code, message = await refusal(site, "beta")
        assert (status, code) == (403, "requirement_not_met")
        assert "region=mars" in message
        assert (await refusal(site, "alpha"))[:2] == (503, "no_worker")
        assert (await site.complete("gamma")).status_code == 200


async def test_only_pools_that_carry_the_labels_are_used(start: Start) -> None:
    tenants = [{"id": "alpha", "requires": EU}, {"id": "beta", "privacy": {"allow_external": True}, "requires": OUT}]
    pools = ({"labels": US}, {"labels": EU}, {"labels": OUT})
    async with start({"tenants": tenants, "models": [models(*pools)]}) as site:
        for tenant, worker in (("alpha", f"{MODEL}/p1-0"), ("beta", f"{MODEL}/p2-0")):
            for _ in range(6):
                assert (await site.complete(tenant)).status_code == 200
            assert workers_of(site, tenant) == {worker}
        swapped = await site.admin.post("/admin/policies", json={"routing": {"use": "round_robin"}})
        assert swapped.status_code == 200
        for _ in range(4):
            assert (await site.complete("alpha")).status_code == 200
        assert workers_of(site) == {f"{MODEL}/p1-0"}, "a swapped routing policy chooses among the same workers"


async def test_an_external_pool_is_never_a_way_out(start: Start) -> None:
    """Not when it is the only one, not for a retry, not as the fallback model of an overloaded queue."""
    tenants = [{"id": "alpha"}, {"id": "beta", "privacy": {"allow_external": True}}]
    async with start({"tenants": tenants, "models": [models({"labels": OUT})]}) as site:
        status, code, message = await refusal(site)
        assert (status, code) == (403, "requirement_not_met")
        assert "allow_external" in message
        assert (await site.complete("beta")).status_code == 200


async def test_a_lost_worker_is_not_replaced_by_one_outside(start: Start) -> None:
    tenants = [{"id": "alpha"}]
    inside = {"labels": {"region": "eu"}}
    changes = {
        "tenants": tenants,
        "models": [models(inside, {"labels": OUT})],
        "timeouts": {"first_token_s": 3, "total_s": 6},
    }
    async with start(changes, echo=Echo(poison=9)) as site:
        answer = await site.complete(prompt=[5, 9])
        assert answer.status_code in (500, 503, 504)
        assert workers_of(site) <= {f"{MODEL}/p0-0", None}


async def test_a_fallback_model_outside_is_no_fallback(start: Start) -> None:
    tenants = [{"id": "alpha"}, {"id": "beta", "privacy": {"allow_external": True}}]
    changes = {
        "tenants": tenants,
        "policies": {"admission": {"use": "full"}},
        "models": [models({}), models({"labels": OUT}, name="outside")],
    }
    async with start(changes, policies=[FULL]) as site:
        assert (await refusal(site))[0] == 429
        answer = await site.complete("beta")
        assert answer.status_code == 200
        assert answer.headers["x-forebay-fallback-model"] == "outside"
