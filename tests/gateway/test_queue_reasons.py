"""What a queue span says of the wait, under every built-in scheduling policy: gateway F9."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

import pytest

from policies.builtin import forebay_policies
from policies.types import TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import Site, pool, tickets, until
from tests.gateway.test_dispatch import drop
from tests.otlp import OtlpReceiver
from workers.testing import Echo

POLICIES = sorted(spec.name for spec in forebay_policies() if spec.kind == "scheduling")
VIRTUAL = {"vtc", "wfq", "drr", "hierarchical", "locality", "priority"}
"""Those that keep a virtual time (``priority``: within a level, by default as vtc)."""
RULE = {
    "fcfs": "arrived first|first of",
    "vtc": "least service/weight",
    "wfq": "virtual|start|finish",
    "drr": "round|deficit|turn|least",
    "priority": "priority",
    "edf": "deadline",
    "sjf": "shortest",
    "locality": "least|prefix",
    "hierarchical": "tenant: .*member: ",
}


async def waited(site: Site, collector: OtlpReceiver, policy: str) -> dict[str, dict[str, Any]]:
    """The queue spans' attributes of two jobs of alpha and one of beta that waited behind two of beta, by name."""
    assert (await site.admin.post("/admin/policies", json={"scheduling": {"use": policy}})).status_code == 200
    ahead = [asyncio.create_task(site.complete("beta", max_tokens=1500)) for _ in range(2)]
    await until(lambda: site.dispatcher.in_flight == 2, "the slot and the line inside are full")
    await until(lambda: any(ticket.first_token_at for ticket in tickets(site)), "one is being served")
    traces, calls = {}, []
    for number, (name, tenant) in enumerate((("first", "alpha"), ("second", "alpha"), ("third", "beta"))):
        traces[name] = secrets.token_hex(16)
        headers = {"traceparent": f"00-{traces[name]}-{'ab' * 8}-01"}
        calls.append(asyncio.create_task(site.complete(tenant, headers=headers)))
        await until(lambda expected=number + 1: len(site.dispatcher.queue) == expected, "it waits")
    served, beta = site.dispatcher.queue.served, TenantId("beta")
    before = served().get(beta, 0)
    await until(lambda: served().get(beta, 0) > before, "beta is served while they wait")
    await drop(ahead)
    assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 3
    found = {}
    for name, trace in traces.items():
        spans = await asyncio.to_thread(collector.wait_for_trace, trace, {"queue", "quota settle"})
        [found[name]] = [span.attributes for span in spans if span.name == "queue"]
    return found


async def test_every_policy_says_why(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with OtlpReceiver() as collector:
        changes = {
            "telemetry": {"otlp_endpoint": collector.endpoint},
            "tenants": [{"id": "alpha", "weight": 3}, {"id": "beta"}],
            "models": [pool(max_running=1)],
        }
        assert set(RULE) == set(POLICIES)
        async with start(changes, echo=Echo(step_s=0.002)) as site:
            for policy in POLICIES:
                spans = await waited(site, collector, policy)
                for name, position, depth, tenant in (
                    ("first", 0, 0, "alpha"), ("second", 1, 1, "alpha"), ("third", 0, 2, "beta"),
                ):  # fmt: skip
                    span = spans[name]
                    assert (span["forebay.queue.policy"], span["forebay.queue.picked_by"]) == (policy, policy)
                    assert (span["forebay.queue.position"], span["forebay.queue.depth"]) == (position, depth), policy
                    assert (span["forebay.tenant"], span["forebay.queue.weight"]) == (
                        (tenant, 3.0) if tenant == "alpha" else (tenant, 1.0)
                    )
                    assert span["forebay.queue.wait_ms"] > 0
                    assert re.search(RULE[policy], span["forebay.queue.picked_because"]), (policy, span)
                    assert ("forebay.queue.virtual_start" in span) is (policy in VIRTUAL), policy
                    behind = dict(entry.rsplit("=", 1) for entry in span["forebay.queue.waited_behind"])
                    assert int(behind["beta"]) > 0, "it ran meanwhile"
                    assert len(behind) <= 5
            await site.at_rest()


async def test_at_most_five_are_named_and_those_served_most(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    tenants = 9
    with OtlpReceiver() as collector:
        names = [f"t{number}" for number in range(tenants)]
        changes = {
            "telemetry": {"otlp_endpoint": collector.endpoint},
            "tenants": [{"id": name} for name in (*names, "alpha", "hold")],
            "models": [pool(max_running=1)],
        }
        async with start(changes, echo=Echo(step_s=0.002)) as site:
            hold = asyncio.create_task(site.complete("hold", max_tokens=3000))
            await until(lambda: site.dispatcher.in_flight == 1, "the slot is taken")
            calls = [
                asyncio.create_task(site.complete(name, max_tokens=2 + 2 * number, prompt=[9]))
                for number, name in enumerate(names)
            ]
            await until(lambda: len(site.dispatcher.queue) + site.dispatcher.in_flight == tenants + 1, "they wait")
            trace = secrets.token_hex(16)
            headers = {"traceparent": f"00-{trace}-{'ab' * 8}-01"}
            last = asyncio.create_task(site.complete("alpha", headers=headers))
            await until(lambda: len(site.dispatcher.queue) == tenants, "alpha waits as well")
            await drop([hold])
            assert {answer.status_code for answer in await asyncio.gather(last, *calls)} == {200}
            spans = await asyncio.to_thread(collector.wait_for_trace, trace, {"queue", "quota settle"})
    [queue] = [span.attributes for span in spans if span.name == "queue"]
    behind = [entry.rsplit("=", 1) for entry in queue["forebay.queue.waited_behind"]]
    tokens = [int(count) for _, count in behind]
    assert len(behind) == 5
    assert tokens == sorted(tokens, reverse=True)
    assert {"hold", "t8", "t7"} & {name for name, _ in behind}
