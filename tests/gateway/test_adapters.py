"""Adapters by name: asked for, granted, loaded and dropped while requests run, billed; never another's answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.settings import Settings
from tests.gateway.harness import AUTH, BASE, Site, merged, pool, running, token, until
from workers.adapters import CONFIG_FILE, WEIGHTS_FILE
from workers.testing import Echo

ROOM = {"adapter_memory": 1000, "max_adapters": 4}
PROMPT = [5, 6, 7, 8, 9, 10, 11]
TENANTS = [
    {"id": "alpha"},
    {"id": "beta", "models": ["echo"]},
    {"id": "gamma", "models": ["echo"], "adapters": {"echo": "sql"}},
    {"id": "delta", "models": ["echo:law"], "groups": {"interns": {"models": ["echo"]}}},
    {"id": "omega", "adapters": {"echo": "late"}},
]
GROUPED = {**AUTH, "with": {**AUTH["with"], "groups_claim": "groups"}}


def write(folder: Path, name: str, content: str | None = None) -> str:
    """An adapter as far as echo workers look at it."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / CONFIG_FILE).write_text(json.dumps({"content": content or name}))
    (folder / name / WEIGHTS_FILE).write_bytes(b"0123456789")
    return name


def settings(folder: Path, *names: str, count: int = 1, **changes: Any) -> Mapping[str, Any]:
    adapters = [{"name": name, "source": write(folder, name)} for name in names]
    models = [pool(count, adapters=adapters, **ROOM), {**pool(), "name": "plain"}]
    return {"models": models, "tenants": TENANTS, "policies": {"auth": GROUPED}, **changes}


async def tokens(site: Site, caller: str = "alpha", **body: Any) -> list[int]:
    answer = await site.complete(caller, prompt=PROMPT, max_tokens=4, logprobs=0, **body)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return [ord(letter) for letter in found]


def said(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def load(site: Site, name: str, source: str, model: str = "echo") -> httpx.Response:
    return await site.admin.post("/admin/adapters", json={"model": model, "name": name, "source": source})


async def test_names_grants_and_tenants_own_adapters(tmp_path: Path) -> None:
    """Security 3 too: whoever may not use an adapter learns nothing of it, whatever name it has."""
    write(tmp_path, "fr")
    async with running(tmp_path, settings(tmp_path, "sql", "law")) as site:
        base, sql, law = [await tokens(site, model=name) for name in ("echo", "sql", "law")]
        assert len({str(one) for one in (base, sql, law)}) >= 2
        assert await tokens(site, model="echo:sql") == sql

        async with site.client("alpha") as client:
            listed = {model.id: model.model_dump().get("parent") async for model in client.models.list()}
            assert listed == {"echo": None, "plain": None, "sql": "echo", "law": "echo"}
            assert (await client.models.retrieve("echo:law")).id == "law"
            answer = await client.completions.create(model="sql", prompt=PROMPT, max_tokens=4)
            assert answer.model == "sql"

        # beta: the model alone. delta: one adapter alone, and its interns not even that.
        assert said(await site.complete("beta", model="sql")) == (404, "model_not_found")
        assert said(await site.complete("beta", model="echo:sql")) == (404, "model_not_found")
        assert said(await site.complete("delta", model="echo")) == (404, "model_not_found")
        assert await tokens(site, "delta", model="law") == law
        intern = {"authorization": f"Bearer {token('delta', groups=['interns'])}"}
        assert said(await site.complete("delta", model="law", headers=intern)) == (403, "model_not_allowed")
        for name in ("sql", "echo:sql", "plain:sql", "echo:", ":sql", "echo:sql:law"):
            one = await site.http.get(f"/v1/models/{name}", headers={"authorization": f"Bearer {token('beta')}"})
            assert one.status_code == 404, name

        # gamma: its requests to the model use the operator's choice.
        assert await tokens(site, "gamma", model="echo") == sql
        assert said(await site.complete("gamma", model="law")) == (404, "model_not_found")
        refused = await site.complete("omega", model="echo")
        assert said(refused) == (404, "adapter_not_found")
        assert "'late'" in refused.json()["error"]["message"]
        assert (await load(site, "late", "fr")).status_code == 201
        assert await tokens(site, "omega", model="echo") == await tokens(site, model="late")


async def test_each_adapter_has_prefix_keys_of_its_own(tmp_path: Path) -> None:
    """Engine A1, A5: a prompt cached under one name is nothing under another; again under its own it is found."""
    prompt = list(range(5, 5 + 64))
    async with running(tmp_path, settings(tmp_path, "sql", "law")) as site:
        for turn in range(2):
            for name in ("echo", "sql", "law"):
                answer = await site.complete(model=name, prompt=prompt)
                cached = answer.json()["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
                assert cached == turn * 48, (turn, name)


async def test_loaded_replaced_and_dropped_while_a_request_runs(tmp_path: Path) -> None:
    """Security 9: a request keeps the content it began with; a dropped one goes with its last request."""
    write(tmp_path, "one")
    write(tmp_path, "two", "other content")
    async with running(tmp_path, settings(tmp_path, count=2), echo=Echo(step_s=0.02)) as site:
        await until(lambda: site.dispatcher.ready == 2, "both workers")
        first = await load(site, "mine", "one")
        assert first.status_code == 201
        assert len(first.json()["workers"]) == 2
        before = await tokens(site, model="mine")
        async with site.stream(model="mine", prompt=PROMPT, max_tokens=200) as response:
            lines = response.aiter_lines()
            await anext(lines)
            second = await load(site, "mine", "two")
            assert second.status_code == 200
            assert second.json()["digest"] != first.json()["digest"]
            after = await tokens(site, model="mine")
            workers = (await site.admin.get("/admin/workers")).json()["workers"]
            digests = [worker["adapters"] for worker in workers if worker["model"] == "echo"]
            assert all(first.json()["digest"] in held for held in digests), "still in use"
            dropped = await site.admin.delete("/admin/adapters/mine")
            assert dropped.status_code == 200, dropped.text
            assert said(await site.complete(model="mine")) == (404, "model_not_found")
            text = "".join([line async for line in lines])
        assert "[DONE]" in text
        assert '"finish_reason":"length"' in text
        assert before != after or first.json()["digest"][:15] == second.json()["digest"][:15]
        await until(lambda: not any(handle.adapters.held for handle in site.dispatcher.workers), "all freed")
        assert (await site.admin.get("/admin/adapters")).json() == {"adapters": []}
        again = await load(site, "mine", "one")
        assert again.json()["digest"] == first.json()["digest"]
        assert await tokens(site, model="mine") == before


async def test_a_drop_waits_for_requests_that_have_begun(tmp_path: Path) -> None:
    write(tmp_path, "one")
    async with running(tmp_path, settings(tmp_path), echo=Echo(step_s=0.05)) as site:
        await load(site, "mine", "one")
        async with site.stream(model="mine", prompt=PROMPT, max_tokens=70) as response:
            lines = response.aiter_lines()
            await anext(lines)
            dropped = await site.admin.delete("/admin/adapters/mine")
            assert (dropped.status_code, dropped.json()["freed"], dropped.json()["requests"]) == (202, False, 1)
            assert "[DONE]" in "".join([line async for line in lines])
        await until(lambda: not site.dispatcher.workers[0].adapters.held, "freed")


async def test_refusals_change_nothing(tmp_path: Path) -> None:
    write(tmp_path, "one")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CONFIG_FILE).write_text("{")
    (tmp_path / "broken" / WEIGHTS_FILE).write_bytes(b"x")
    large = write(tmp_path, "large")
    (tmp_path / "large" / WEIGHTS_FILE).write_bytes(bytes(2000))
    async with running(tmp_path, settings(tmp_path, "sql")) as site:
        cases = [
            ({"model": "echo", "name": "a", "source": "nowhere"}, 400, "source", "is no directory"),
            ({"model": "echo", "name": "sql", "source": "broken"}, 400, "source", "is no JSON"),
            ({"model": "echo", "name": "a", "source": large}, 400, "source", "engine.adapter_memory=1,000 are left"),
            ({"model": "nobody", "name": "a", "source": "one"}, 404, "model", "'nobody' is not served"),
            ({"model": "plain", "name": "a", "source": "one"}, 409, "model", "set engine.adapter_memory"),
            ({"model": "echo", "name": "plain", "source": "one"}, 409, "name", "taken by a model"),
            ({"model": "echo", "name": "a:b", "source": "one"}, 400, "name", "String should match"),
            ({"model": "echo", "name": "a"}, 400, "source", "is missing"),
            ({"model": "echo", "name": "a", "source": "one", "rank": 3}, 400, "rank", "known: "),
        ]
        before = (await site.admin.get("/admin/adapters")).json()
        for body, status, param, words in cases:
            answer = await site.admin.post("/admin/adapters", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), error
            assert words in error["message"], error
        assert said(await site.admin.delete("/admin/adapters/a")) == (404, "adapter_not_found")
        assert (await site.admin.get("/admin/adapters")).json() == before
        assert len(await tokens(site, model="sql")) > 0
        for number in range(3):
            assert (await load(site, f"n{number}", write(tmp_path, f"n{number}"))).status_code == 201
        full = await load(site, "n3", write(tmp_path, "n3"))
        assert "engine.max_adapters=4: drop one" in full.json()["error"]["message"]
        assert [handle.adapters.held for handle in site.dispatcher.workers] == [
            frozenset(one["digest"] for one in (await site.admin.get("/admin/adapters")).json()["adapters"])
        ]


async def test_a_worker_that_comes_later_has_what_the_others_have(tmp_path: Path) -> None:
    """Loaded and dropped by the admin API holds for a restarted worker; what waits for it is answered."""
    write(tmp_path, "one")
    async with running(tmp_path, settings(tmp_path, "sql")) as site:
        made = (await load(site, "mine", "one")).json()
        wanted = await tokens(site, model="mine")
        assert (await site.admin.delete("/admin/adapters/sql")).status_code == 200
        handle = site.dispatcher.workers[0]
        assert handle.hello is not None

        os.kill(handle.hello.pid, signal.SIGKILL)
        await until(lambda: not site.dispatcher.ready, "the loss")
        assert await tokens(site, model="mine") == wanted
        await until(lambda: [h.adapters.held for h in site.dispatcher.workers] == [{made["digest"]}], "as before")
        assert said(await site.complete(model="sql")) == (404, "model_not_found")


async def test_usage_price_trace_and_audit_name_the_adapter(tmp_path: Path) -> None:
    prices = {"models": {"echo": {"input": "1", "output": "1"}, "echo:sql": {"input": "5", "output": "5"}}}
    changes = settings(
        tmp_path,
        "sql",
        policies={"auth": GROUPED, "quota": {"use": "ledger"}},
        prices=prices,
        state={"path": str(tmp_path / "state")},
    )
    async with running(tmp_path, changes) as site:
        await tokens(site, model="echo")
        await tokens(site, model="sql")
        assert (await site.admin.delete("/admin/adapters/sql")).status_code == 200
        usage = (await site.admin.get("/admin/usage", params={"group_by": "model"})).json()
        rows = {row["model"]: row for row in usage["rows"]}
        assert set(rows) == {"echo", "echo:sql"}
        assert Decimal(rows["echo:sql"]["cost"]) == 5 * Decimal(rows["echo"]["cost"]) > 0
        entries = (await site.admin.get("/admin/audit")).json()["entries"]
        assert ("adapter.drop", "adapter:echo:sql") in {(entry["action"], entry["subject"]) for entry in entries}
        (worker,) = site.dispatcher.workers
        assert worker.hello is not None
        text = (await site.http.get(f"http://127.0.0.1:{worker.hello.metrics_port}/metrics")).text
        assert "forebay_adapters 0.0" in text
        assert "forebay_adapter_tokens_total 10.0" in text


BAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "a model's name": ({"models": [pool(adapters=[{"name": "echo", "source": "x"}])]}, "is a model's name"),
    "two owners": (
        {
            "models": [
                pool(adapters=[{"name": "sql", "source": "x"}]),
                {**pool(adapters=[{"name": "sql", "source": "x"}]), "name": "other"},
            ]
        },
        "is an adapter of the model 'echo' already",
    ),
    "twice": (
        {"models": [pool(adapters=[{"name": "sql", "source": "x"}, {"name": "sql", "source": "y"}])]},
        "two adapters are called 'sql'",
    ),
    "too many": (
        {"models": [pool(max_adapters=1, adapters=[{"name": n, "source": "x"} for n in "ab"])]},
        "raise it or name fewer",
    ),
    "a price for nothing": ({"prices": {"models": {"echo:sql": {"input": "1"}}}}, "unknown model 'echo:sql'"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_in_the_file_are_named(case: str) -> None:
    changes, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        Settings.model_validate(merged(BASE, changes))
