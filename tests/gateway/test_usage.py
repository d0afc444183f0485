"""Usage from the outside: a caller's own, the operator's reports, the command; and that they are what was billed."""

from __future__ import annotations

import asyncio
import csv
import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.settings_quota import Prices
from gateway.usage import as_csv, today
from tests.gateway.harness import MODEL, Site, token, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = Echo(step_s=0.001)
SETTINGS: dict[str, Any] = {
    "state": {"path": "state"},
    "policies": {"quota": {"use": "ledger"}},
    "organisations": [{"id": "acme", "limits": {"budget": {"currency_per_month": 5}}}],
    "tenants": [
        {
            "id": "one",
            "organisation": "acme",
            "cost_centre": "=1+1",
            "limits": {"tokens_per_day": 5_000},
            "user_limits": {"concurrent": 3},
        },
        {"id": "two"},
    ],
    "prices": {"currency": "EUR", "models": {MODEL: {"input": 100, "output": 500}}, "price_per_device_hour": 3.6},
}


def bearer(tenant: str, user: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token(tenant, sub=user)}"}


async def spend(site: Site, tenant: str, user: str, prompt: int, output: int) -> dict[str, int]:
    body = {"model": MODEL, "prompt": [7] * prompt, "max_tokens": output}
    answer = await site.http.post("/v1/completions", json=body, headers=bearer(tenant, user))
    assert answer.status_code == 200
    usage: dict[str, int] = answer.json()["usage"]
    return usage


async def test_reports_are_what_callers_were_told(shared: Site) -> None:
    told = {
        ("one", "ann"): [await spend(shared, "one", "ann", 20, 10), await spend(shared, "one", "ann", 30, 5)],
        ("one", "bob"): [await spend(shared, "one", "bob", 40, 10)],
        ("two", "=cmd()"): [await spend(shared, "two", "=cmd()", 10, 10)],
    }
    report = (await shared.admin.get("/admin/usage?group_by=tenant,user")).json()
    assert {(row["tenant"], row["user"]): row["requests"] for row in report["rows"]} == {
        key: len(usages) for key, usages in told.items()
    }
    for row in report["rows"]:
        usages = told[row["tenant"], row["user"]]
        assert row["input_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
        assert row["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert report["total"]["requests"] == 4
    ann = next(row for row in report["rows"] if row["user"] == "ann")
    assert ann["cost"] == "0.0125"
    assert (report["currency"], report["from"], report["to"]) == (
        "EUR",
        today().replace(day=1).isoformat(),
        today().isoformat(),
    )

    text = (await shared.admin.get("/admin/usage?group_by=tenant,user,cost_centre&format=csv")).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["user"] for row in rows} == {"ann", "bob", "'=cmd()"}, "no formula reaches a spreadsheet"
    assert {row["cost_centre"] for row in rows} == {"'=1+1", ""}
    only = (await shared.admin.get("/admin/usage?group_by=day,model&tenant=two")).json()
    assert [(row["day"], row["model"], row["requests"]) for row in only["rows"]] == [(today().isoformat(), MODEL, 1)]

    own = await shared.http.get("/v1/usage", headers=bearer("one", "bob"))
    assert own.headers["x-ratelimit-limit-tokens"] == "5000"
    body = own.json()
    assert (body["user"], body["month"]["requests"], body["month"]["input_tokens"]) == ("bob", 1, 40)
    limits = {(item["level"], item["limit"]): item for item in body["limits"]}
    assert limits["organisation", "currency_per_month"]["maximum"] == "5"
    assert float(limits["organisation", "currency_per_month"]["remaining"]) == pytest.approx(5 - 0.0125 - 0.009)
    assert limits["tenant", "tokens_per_day"]["remaining"] == pytest.approx(5_000 - 115, abs=2)
    assert limits["user", "concurrent"]["remaining"] == 3
    assert "acme" not in own.text


async def test_bad_questions_get_their_answer(shared: Site) -> None:
    for query, param in (
        ("group_by=content", "group_by"),
        ("group_by=tenant,tenant", "group_by"),
        ("from=yesterday", "from"),
        ("from=2026-02-01&to=2026-01-01", "from"),
        ("to=2026-13-01", "to"),
        ("format=xml", "format"),
        ("tennant=a", "tennant"),
    ):
        answer = await shared.admin.get(f"/admin/usage?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), query
    assert (await shared.http.get("/v1/usage")).status_code == 401
    assert (await shared.http.get("/admin/usage")).status_code == 404
    empty = (await shared.admin.get("/admin/usage?from=2020-01-01&to=2020-01-02&tenant=' OR 1=1 --")).json()
    assert (empty["rows"], empty["total"]["requests"]) == ([], 0)
    (head,) = as_csv(empty).splitlines()
    assert head.startswith("tenant,requests,input_tokens,"), "a table without rows has its columns all the same"


async def test_the_command_prints_tables_csv_and_json(shared: Site, tmp_path: Path) -> None:
    await spend(shared, "two", "eve", 5, 5)

    def run(*arguments: str) -> Any:
        config = tmp_path / "c.yaml"
        model = f"{{name: {MODEL}, source: x, pools: [{{name: p}}]}}"
        config.write_text(f"policies: {{auth: {{use: none, with: {{tenant: t}}}}}}\nmodels: [{model}]\n")
        command = ["usage", "--url", shared.admin_url, "--config", str(config), *arguments]
        return CliRunner().invoke(app, command)

    table = await asyncio.to_thread(run, "--group-by", "tenant,user", "--only", "tenant=two")
    assert table.exit_code == 0, table.output
    assert "eve" in table.stdout
    assert "total" in table.stdout
    assert "money in EUR" in table.stderr
    text = (await asyncio.to_thread(run, "--format", "csv")).stdout
    assert {row["tenant"] for row in csv.DictReader(io.StringIO(text))} >= {"two"}
    assert '"currency": "EUR"' in (await asyncio.to_thread(run, "--format", "json")).stdout
    for bad in (("--format", "xml"), ("--only", "tenant")):
        assert (await asyncio.to_thread(run, *bad)).exit_code != 0


async def test_a_swap_to_a_policy_without_memory_says_so(shared: Site) -> None:
    """And back: nothing is forgotten, no budget starts anew."""
    before = (await shared.admin.get("/admin/usage")).json()["total"]
    left = [
        item["remaining"] for item in (await shared.http.get("/v1/usage", headers=bearer("one", "x"))).json()["limits"]
    ]
    assert (await shared.admin.post("/admin/policies", json={"quota": {"use": "token_bucket"}})).status_code == 200
    refused = await shared.admin.get("/admin/usage")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_ledger")
    own = (await shared.http.get("/v1/usage", headers=bearer("one", "x"))).json()
    assert own["month"] is None
    assert next(item["remaining"] for item in own["limits"]) == left[0]
    assert (await shared.admin.post("/admin/policies", json={"quota": {"use": "ledger"}})).status_code == 200
    assert (await shared.admin.get("/admin/usage")).json()["total"]["requests"] == before["requests"]
    own = (await shared.http.get("/v1/usage", headers=bearer("one", "x"))).json()
    assert next(item["remaining"] for item in own["limits"]) == left[0]


async def test_a_reload_keeps_the_figures_while_requests_run(shared: Site) -> None:
    """One file, one set of books: what runs across the swap is settled once."""
    before = (await shared.admin.get("/admin/usage")).json()["total"]["requests"]
    running = asyncio.create_task(spend(shared, "two", "across", 5, 1500))
    await until(lambda: shared.dispatcher.queue.running == 1, "it runs")
    change = {"quota": {"use": "ledger", "with": {"lease_s": 800}}}
    assert (await shared.admin.post("/admin/policies", json=change)).status_code == 200
    assert shared.slots("two") == 1
    await running
    await until(lambda: shared.slots("two") == 0, "it is settled")
    assert (await shared.admin.get("/admin/usage")).json()["total"]["requests"] == before + 1


async def test_a_changed_price_holds_for_what_arrives_afterwards(shared: Site) -> None:
    """In the middle of a month and of a request: what was reserved settles at its own price."""
    settings = shared.gateway.settings
    dearer = Prices.model_validate({"currency": "EUR", "models": {MODEL: {"input": 200, "output": 1000}}})
    running = asyncio.create_task(spend(shared, "two", "price", 10, 400))
    await until(lambda: shared.slots("two") == 1, "it runs")
    shared.gateway._apply(settings.model_copy(update={"prices": dearer}))
    try:
        first, second = await running, await spend(shared, "two", "price", 10, 10)
    finally:
        shared.gateway._apply(settings)
    (row,) = (await shared.admin.get("/admin/usage?group_by=user&user=price")).json()["rows"]
    costs = [
        usage["prompt_tokens"] * price + usage["completion_tokens"] * 5 * price
        for usage, price in ((first, 100), (second, 200))
    ]
    assert Decimal(row["cost"]) == Decimal(sum(costs)) / 10**6
