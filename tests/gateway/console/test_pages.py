"""What the pages show: figures of a gateway that works, hostile names, and never what was asked or answered."""

from __future__ import annotations

import asyncio
import json

import pytest
from markupsafe import escape

from gateway.console_data import ConsoleData
from policies.types import Charge
from tests.gateway.conftest import Start
from tests.gateway.console.browser import PAGES, messages, text, visitor
from tests.gateway.harness import KEY, MODEL, Site, tickets, token, until
from tests.otlp import OtlpReceiver
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = "<script>alert('x')</script>"
HOSTILE_TENANT = f"{HOSTILE}\"'><img src=x onerror=alert(1)>"
HOSTILE_MODEL = 'm"><svg onload=alert(1)>'
CANARY = "canary-4711-please-do-not-tell"
SETTINGS = {
    "tenants": [
        {
            "id": "alpha",
            "weight": 3,
            "limits": {"requests_per_day": 100, "tokens_per_minute": 50_000, "concurrent": 9},
        },
        {"id": "beta", "class": "batch"},
    ],
    "tenant_defaults": {"weight": 1, "class": "interactive"},
    "policies": {"admission": {"use": "bounded", "with": {"max_queued": 40}}},
    "models": [
        {
            "name": name,
            "source": "model",
            "pools": [{"name": "local", "launch": {"use": "echo"}, "engine": {"blocks": 256, "max_running": 2}}],
        }
        for name in (MODEL, HOSTILE_MODEL)
    ],
}
ECHO = Echo(step_s=0.01)


async def test_every_page_renders_without_any_traffic(shared: Site) -> None:
    for path in PAGES:
        answer = await shared.admin.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "Connecting" in answer.text
    for kind in ("auth", "quota", "cache_scope", "scheduling", "routing", "admission", "nonsense"):
        assert (await shared.admin.get(f"/console/policies?kind={kind}")).status_code == 200


async def test_figures_of_work_in_progress(shared: Site) -> None:
    """Two slots: of four requests two run and two wait; each page says so, and the last one drained says nothing."""
    calls = [asyncio.create_task(shared.complete(who, max_tokens=2000)) for who in ("alpha", "beta", "alpha", "beta")]
    try:
        await until(lambda: shared.dispatcher.queue.running >= 3, "the slots and the line inside are full")
        await until(lambda: len({t.job.tenant for t in tickets(shared) if t.first_token_at}) == 2, "both are served")
        shared.gateway.parts.history.take()
        overview = (await shared.admin.get("/admin/overview")).json()
        assert overview["now"]["running"] + overview["now"]["queued"] == 4
        assert {row["id"]: row["weight"] for row in overview["tenants"]} == {"alpha": 3.0, "beta": 1.0}
        assert sum(row["share"] for row in overview["tenants"]) == pytest.approx(1)
        assert {row["id"]: row["entitled"] for row in overview["tenants"]} == {"alpha": 0.75, "beta": 0.25}

        requests = text((await shared.admin.get("/console/requests")).text)
        running = shared.dispatcher.queue.running
        assert f"Running {running}" in requests
        assert f"Queued {4 - running}" in requests
        assert requests.count("/ 2,000") == running

        workers = text((await shared.admin.get("/console/workers")).text)
        assert "2 of 2" in workers
        assert "In use by" in workers
        tenants = text((await shared.admin.get("/console/tenants")).text)
        assert "98 / 100" in tenants, "two of a hundred requests a day are taken: none comes back meanwhile"
        assert "7 / 9" in tenants, "two of nine slots are taken"
        found = text((await shared.admin.get("/console/tenants?q=BET")).text)
        assert "beta" in found
        assert "alpha" not in found
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await shared.at_rest()


async def test_the_slowest_requests_link_to_their_traces(start: Start) -> None:
    """The link holds the id of the very trace that a collector received; what it holds besides is escaped."""
    with OtlpReceiver() as receiver:
        template = "https://jaeger.example/trace/{trace_id}?x=<&>"
        async with start({"telemetry": {"otlp_endpoint": receiver.endpoint, "jaeger_ui": template}}) as site:
            assert (await site.complete(max_tokens=30, headers={"x-request-id": "slow-one"})).status_code == 200
            html = (await site.admin.get("/console/requests")).text
            row = html[html.index("slow-one") :]
            trace = site.gateway.parts.recent.slowest(1, 60)[0].summary.trace_id
            assert f'href="https://jaeger.example/trace/{trace}?x=&lt;&amp;&gt;"' in row
            assert "30" in text(row[: row.index("</tr>")])
        assert receiver.spans(trace), "stopping exports what is left"


async def test_hostile_names_are_text(shared: Site) -> None:
    """XSS by tenant (a token's claim), model (configuration), and search field."""
    calls = [
        asyncio.create_task(
            shared.http.post(
                "/v1/completions",
                json={"model": model, "prompt": [5, 6], "max_tokens": 2000},
                headers={"authorization": f"Bearer {token(HOSTILE_TENANT)}", "x-request-id": "<b>id</b>"},
            )
        )
        for model in (MODEL, HOSTILE_MODEL)
    ]
    try:
        await until(lambda: all(d.in_flight for d in shared.gateway.parts.dispatchers.values()), "both run")
        pages = [(await shared.admin.get(path)).text for path in (*PAGES, f"/console/tenants?q={HOSTILE}")]
        pages += [
            data
            for page in ("overview", "tenants", "workers", "requests")
            for _, data in await messages(shared, page, 1)
        ]
        for html in pages:
            for raw in (HOSTILE, "<img", "<svg onload", "onerror=alert(1)>", "<b>id</b>"):
                assert raw not in html.replace('<img src="/console/static/', "")
        assert any(str(escape(HOSTILE)) in html for html in pages)
        assert any(str(escape(HOSTILE_MODEL)) in html for html in pages)
        async with visitor(shared) as mine:
            purged = await mine.post("/console/actions/purge", tenant=HOSTILE_TENANT)
            assert purged.status_code in (200, 202)
            assert str(escape(HOSTILE)) in purged.text
            assert HOSTILE not in purged.text
            for name, field in (("drain", "worker"), ("cancel", "job"), ("swap", "kind")):
                assert HOSTILE not in (await mine.post(f"/console/actions/{name}", **{field: HOSTILE})).text
            wrong = await mine.post("/console/actions/check", kind="scheduling", use=HOSTILE, **{"with": HOSTILE})
            assert HOSTILE not in wrong.text
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await shared.at_rest()


async def test_no_page_ever_tells_what_was_asked_or_answered(shared: Site) -> None:
    """The canary goes in as a prompt, comes back as its answer, and is seen nowhere: while it runs and afterwards."""
    body = {"model": MODEL, "max_tokens": 400, "prompt": CANARY}
    headers = {"authorization": f"Bearer {token('alpha')}"}
    call = asyncio.create_task(shared.http.post("/v1/completions", json=body, headers=headers))

    async def seen() -> str:
        pages = [(await shared.admin.get(path)).text for path in (*PAGES, "/admin/overview")]
        for page in ("overview", "tenants", "workers", "requests", "policies"):
            pages += [data for _, data in await messages(shared, page, 1)]
        async with visitor(shared) as mine:
            pages.append((await mine.post("/console/actions/purge", tenant="alpha")).text)
        return "".join(pages)

    await until(lambda: shared.dispatcher.in_flight, "it runs")
    during = await seen()
    answer = (await call).json()
    assert CANARY in answer["choices"][0]["text"], "the echo worker says what it was told"
    after = await seen()
    assert CANARY not in during + after
    assert KEY not in during + after
    await shared.at_rest()


async def test_a_stream_has_html_and_the_charts_numbers(shared: Site) -> None:
    assert (await shared.complete()).status_code == 200
    shared.gateway.parts.history.take()
    (name, data), (unnamed, html), (next_name, row) = await messages(shared, "overview", 3)
    assert (name, unnamed, next_name) == ("forebay:history", "", "forebay:sample")
    history = json.loads(data)
    assert [tenant["name"] for tenant in history["tenants"]]
    assert len(history["columns"]) == len(json.loads(row)) == 11 + 2 * len(history["tenants"])
    assert "Share against weight" in html
    ((name, html),) = await messages(shared, "workers", 1)
    assert (name, "KV blocks" in html) == ("", True)


async def test_thousands_of_tenants_make_a_short_page(start: Start) -> None:
    """The overview has the busiest, the page of tenants the first hundred and a search."""
    many = [{"id": f"tenant-{n:04d}", "weight": 1 + n % 5} for n in range(3000)]
    async with start({"tenants": many, "tenant_defaults": {}}, ready=False) as site:
        for name, tokens in (("tenant-2999", 900), ("stranger", 100), ("another", 50)):
            site.gateway.parts.metrics.charged(name, "interactive", Charge(output=tokens))
        site.gateway.parts.history.take()
        overview = (await site.admin.get("/admin/overview")).json()
        rows = {row["id"]: row for row in overview["tenants"]}
        assert len(rows) <= 13
        assert rows["tenant-2999"]["share"] == pytest.approx(900 / 1050)
        assert rows["other"]["share"] == pytest.approx(150 / 1050), "those that nobody lists are one, as in the metrics"
        assert overview["more_tenants"] == 3001 - len(rows)
        page = text((await site.admin.get("/console/tenants")).text)
        assert "tenant-0099" in page
        assert "tenant-0100" not in page
        assert "2,900 more" in page
        assert "tenant-1234" in text((await site.admin.get("/console/tenants?q=T-1234")).text)


async def test_a_page_that_does_not_change_is_sent_once(shared: Site) -> None:
    await shared.at_rest()
    lines: list[str] = []
    async with shared.admin.stream("GET", "/console/live/policies") as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
            if lines.count(": still here") == 2:
                break
    assert sum(line.startswith("data:") and "In force" in line for line in lines) == 1


async def test_cached_blocks_are_shown_per_tenant_and_gone_after_a_purge(start: Start) -> None:
    """What the worker itself says of each tenant's cache, on both pages; the worker knows no tenant's name."""
    prompt = list(range(5, 5 + 16 * 6))
    async with start() as site:
        [handle] = site.dispatcher.workers

        def rows() -> dict[str, int]:
            return {row.id: row.cached_blocks for row in ConsoleData(site.gateway).tenants().rows}

        assert (await site.complete("alpha", prompt=prompt)).status_code == 200
        assert (await site.complete("beta", prompt=prompt[:40])).status_code == 200
        await until(lambda: rows() == {"alpha": 6, "beta": 2}, "the report of an idle worker")
        assert "alpha" not in repr(handle.stats)
        workers = text((await site.admin.get("/console/workers")).text)
        assert "Cached for alpha 6 beta 2" in workers
        assert "6 blocks" in text((await site.admin.get("/console/tenants?q=alpha")).text)
        assert (await site.admin.delete("/admin/tenants/alpha/cache")).status_code == 200
        await until(lambda: rows() == {"alpha": 0, "beta": 2}, "the purge shows")
        lines = (await site.admin.get("/metrics")).text
        assert 'forebay_worker_kv_blocks{state="cached",worker=' in lines


async def test_what_is_left_of_a_months_budgets_is_shown(start: Start) -> None:
    """In tokens and in money, the tenant's own and its organisation's."""
    budget = {"tokens_per_month": 5000, "currency_per_month": 12.5}
    changes = {
        "organisations": [{"id": "acme", "limits": {"budget": {"tokens_per_month": 90_000}}}],
        "tenants": [{"id": "alpha", "organisation": "acme", "limits": {"budget": budget}}, {"id": "beta"}],
        "prices": {"currency": "EUR", "models": {MODEL: {"input": 1_000_000, "output": 1_000_000}}},
    }
    async with start(changes) as site:
        answer = await site.complete("alpha", prompt=[5, 6, 7, 8], max_tokens=2)
        assert answer.status_code == 200
        page = text((await site.admin.get("/console/tenants?q=alpha")).text)
        assert "tokens this month 4,994 / 5,000" in page
        assert "EUR this month 6 / 12" in page
        assert "tokens this month, organisation 89,994 / 90,000" in page
        assert "this month" not in text((await site.admin.get("/console/tenants?q=beta")).text)
