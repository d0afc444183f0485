"""What a reload changes, what it leaves for a restart, and that it is the truth for what the file names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.reloading import RESTART, compare, differences, in_force
from gateway.settings import PolicyUse, Settings
from policies.types import TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import BASE, merged, pool, until
from tests.gateway.test_dispatch import OPEN, backlog
from workers.testing import Echo


def settings(**changes: Any) -> Settings:
    return Settings.model_validate(merged(BASE, changes))


@pytest.mark.parametrize(
    ("changes", "changed", "needs_restart"),
    [
        ({}, (), ()),
        ({"tenants": [{"id": "alpha", "weight": 3}, {"id": "beta"}]}, ("tenants[alpha].weight",), ()),
        ({"tenants": [{"id": "beta"}, {"id": "gamma"}]}, ("tenants[alpha]", "tenants[gamma]"), ()),
        ({"tenants": [{"id": "beta"}, {"id": "alpha"}]}, (), ()),
        ({"classes": {"batch": {"max_wait_s": 5}, "night": {}}}, ("classes[batch].max_wait_s", "classes[night]"), ()),
        ({"tenant_defaults": {"weight": 2}}, ("tenant_defaults",), ()),
        ({"queue": {"max_running_per_class": {"batch": 1}}}, ("queue.max_running_per_class",), ()),
        ({"timeouts": {"total_s": 9, "step_stall_s": 9}}, ("timeouts.total_s",), ("timeouts.step_stall_s",)),
        ({"listen": {"host": "::1"}, "telemetry": {"slow_s": 1}}, (), ("listen.host", "telemetry.slow_s")),
        ({"policies": {"scheduling": {"use": "vtc"}}}, ("policies.scheduling.use",), ()),
        (
            {"models": [pool(threads=2), {**pool(), "name": "new"}]},
            (),
            ("models[echo].pools[local].engine.threads", "models[new]"),
        ),
    ],
)
def test_changes_are_named_by_their_path(
    changes: dict[str, Any], changed: tuple[str, ...], needs_restart: tuple[str, ...]
) -> None:
    found = compare(settings(), settings(**changes))
    assert (found.changed, found.needs_restart) == (changed, needs_restart)


def test_what_needs_a_restart_stays_as_it_is() -> None:
    live = settings()
    wanted = settings(listen={"host": "::1"}, timeouts={"total_s": 9, "step_stall_s": 9}, queue={"max_overtaken": 5})
    taken = in_force(live, wanted)
    assert taken.listen == live.listen
    assert (taken.timeouts.total_s, taken.timeouts.step_stall_s) == (9, live.timeouts.step_stall_s)
    assert taken.queue.max_overtaken == 5
    assert list(differences(taken, in_force(live, taken))) == []


def test_every_section_is_live_or_listed() -> None:
    """A section that is added has to be thought about: here, and in ``Gateway._apply``."""
    live = {
        "policies",
        "queue",
        "classes",
        "organisations",
        "tenants",
        "tenant_defaults",
        "prices",
        "streams",
        "idempotency",
        "timeouts",
    }
    assert live | {path.partition(".")[0] for path in RESTART} == set(Settings.model_fields)


def written(path: Path, changes: dict[str, Any]) -> None:
    base = merged(BASE, {"models": [{"name": "echo", "source": "model", "pools": [{"name": "local"}]}]})
    path.write_text(yaml.safe_dump(merged(base, changes)))


async def test_a_reload_under_load(start: Start, tmp_path: Path) -> None:
    """issue 4: policies, weights, classes, limits and caps change live; queued requests stay; the answer says what."""
    path = tmp_path / "config.yaml"
    before: dict[str, Any] = {"policies": {**BASE["policies"], **OPEN}}
    written(path, before)
    changes = {"models": [pool(max_running=2)], **before}
    async with start(changes, echo=Echo(step_s=0.003), config_path=path) as site:
        calls = await backlog(site, {"alpha": 20, "beta": 20}, max_tokens=8)
        wanted = {
            "policies": {**BASE["policies"], **OPEN, "scheduling": {"use": "vtc"}},
            "tenants": [{"id": "alpha", "weight": 3}, {"id": "beta", "class": "batch"}, {"id": "gamma"}],
            "queue": {"max_running_per_tenant": 1, "max_overtaken": 7},
            "timeouts": {"policy_s": 3, "drain_s": 5},
            "listen": {"host": "127.0.0.2", "port": 0},
        }
        written(path, wanted)
        answer = await site.admin.post("/admin/policies", json={"reload": True})
        assert answer.status_code == 200
        assert answer.json()["reload"] == {
            "changed": [
                "policies.scheduling",
                "queue.max_running_per_tenant",
                "queue.max_overtaken",
                "tenants[alpha].weight",
                "tenants[beta].class",
                "tenants[gamma]",
                "timeouts.policy_s",
            ],
            "needs_restart": ["listen.host", "models[echo].pools[local].launch.use", *MODELS],
        }
        assert site.dispatcher.snapshot()["policy"] == "vtc"
        assert site.gateway.parts.gatekeeper.budget_s == 3
        assert site.dispatcher.queue.max_passed == 7
        late = asyncio.create_task(site.complete("gamma", max_tokens=8))
        names = ("alpha", "beta", "gamma")

        def most() -> int:
            return max(site.dispatcher.queue.running_of(TenantId(name)) for name in names)

        await until(lambda: most() <= 1, "what ran before the cap has ended")
        while len(site.dispatcher.queue):
            assert most() <= 1
            await asyncio.sleep(0.005)
        answers = await asyncio.gather(*calls, late)
        assert {answer.status_code for answer in answers} == {200}
        # Again: nothing is new, nothing is swapped.
        same = await site.admin.post("/admin/policies", json={"reload": True})
        assert same.json()["reload"]["changed"] == []
        assert same.json()["generation"] == 2


MODELS = ["models[echo].pools[local].engine.blocks", "models[echo].pools[local].engine.max_running"]


async def test_the_file_is_the_truth_for_what_the_admin_api_changed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    written(path, {})
    async with start(config_path=path) as site:
        await site.gateway.parts.runtime.swap({"scheduling": PolicyUse(use="vtc")})
        answer = await site.admin.post("/admin/policies", json={"reload": True})
        assert answer.json()["policies"]["scheduling"]["use"] == "fcfs"
        assert answer.json()["reload"]["changed"] == ["policies.scheduling"]
        # A mistake that only the policies can see, with other changes beside it: nothing of it is taken.
        wrong = {"use": "bounded", "with": {"overload": {"fallback_model": "nope"}}}
        written(path, {"policies": {**BASE["policies"], "admission": wrong}, "tenants": [{"id": "gamma"}]})
        refused = await site.admin.post("/admin/policies", json={"reload": True})
        assert refused.status_code == 400
        assert "no model is named 'nope'" in refused.json()["error"]["message"]
        assert (await site.complete("alpha")).status_code == 200
        assert (await site.complete("gamma")).status_code == 403


async def test_a_reload_of_the_log(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sample is live; level and format are told to need a restart, and stay."""
    path = tmp_path / "config.yaml"
    written(path, {})
    async with start(config_path=path) as site:

        async def lines() -> int:
            capsys.readouterr()
            for _ in range(3):
                assert (await site.complete()).status_code == 200
            return sum("outcome=ok" in line for line in "".join(capsys.readouterr()).splitlines())

        assert await lines() == 3
        written(path, {"log": {"sample_ratio": 0.0, "level": "error", "format": "json"}})
        answer = await site.admin.post("/admin/policies", json={"reload": True})
        told = answer.json()["reload"]
        assert told["changed"] == ["log.sample_ratio"]
        assert {"log.level", "log.format"} <= set(told["needs_restart"])
        assert await lines() == 0
        capsys.readouterr()
        refused = await site.complete("nobody")
        assert refused.status_code == 403
        written(path, {})
        assert (await site.admin.post("/admin/policies", json={"reload": True})).json()["reload"]["changed"] == [
            "log.sample_ratio"
        ]
        assert await lines() == 3
        written(path, {"log": {"sample_ratio": 1.5}})
        refused = await site.admin.post("/admin/policies", json={"reload": True})
        assert refused.status_code == 400
        assert "log.sample_ratio" in refused.json()["error"]["message"]
        assert await lines() == 3
