"""What an operator does from the console, and what comes of it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from html import unescape
from pathlib import Path

import pytest
import yaml

from gateway.ticket import TicketState
from tests.gateway.conftest import Start
from tests.gateway.console.browser import text, visitor
from tests.gateway.harness import BASE, Site, events, merged, tickets, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = Echo(step_s=0.02)
HASH = "sha256:" + "a" * 64
SETTINGS = {
    "policies": {
        "auth": {
            "use": "chain",
            "with": {
                "policies": [
                    BASE["policies"]["auth"],
                    {"use": "api_key", "with": {"keys": [{"hash": HASH, "tenant": "beta"}]}},
                ]
            },
        }
    }
}


async def test_a_purge_has_a_signed_receipt(shared: Site) -> None:
    """The cached blocks are zeroed, the epoch rises, and the receipt is this gateway's."""
    assert (await shared.complete(prompt=list(range(5, 85)), max_tokens=1)).status_code == 200
    await until(lambda: shared.dispatcher.workers[0].stats.cached_blocks, "the prompt is cached")
    async with visitor(shared) as mine:
        answer = await mine.post("/console/actions/purge", tenant="alpha")
        assert answer.status_code == 200
        assert "Cache of alpha purged" in answer.text
        receipt = json.loads(unescape(re.search(r"<pre[^>]*>(.*?)</pre>", answer.text, re.DOTALL).group(1)))  # type: ignore[union-attr]
        signature = receipt.pop("signature")
        signed = json.dumps(receipt, sort_keys=True, separators=(",", ":")).encode()
        assert signature == hmac.new(shared.gateway.parts.secret, signed, hashlib.sha256).hexdigest()
        assert (receipt["tenant"], receipt["epoch"], receipt["complete"]) == ("alpha", 1, True)
        assert receipt["zeroed_blocks"] >= 5
        assert (await mine.post("/console/actions/purge", tenant="nobody")).status_code == 404


async def test_what_was_done_is_in_the_audit_log_as_the_admin_api_would_have_it(start: Start) -> None:
    """With its receipt, under the operator's own name; what changed nothing is not there."""
    changes = {"state": {"path": "state"}, "admin": {"operators": {"ann": "ANN_TOKEN"}}, **SETTINGS}
    env = {"FOREBAY_ADMIN_TOKEN": "a secret", "ANN_TOKEN": "another"}
    async with start(changes, env=env, echo=ECHO) as site, visitor(site) as mine:
        await mine.get("/console/login")
        assert (await mine.post("/console/login", token="another")).status_code == 303
        await mine.get("/console")

        async def act(action: str, status: int = 200, **fields: str) -> str:
            answer = await mine.post(f"/console/actions/{action}", **fields)
            assert answer.status_code == status, (action, answer.text)
            return answer.text

        purged = await act("purge", tenant="alpha")
        await act("purge", 404, tenant="nobody")
        call = asyncio.create_task(site.complete(max_tokens=2000))
        await until(lambda: tickets(site), "it is there")
        [job] = [ticket.job.id for ticket in tickets(site)]
        await act("cancel", job=job)
        assert (await call).status_code == 403
        await act("check", kind="scheduling", use="wfq")
        await act("swap", 422, kind="scheduling", use="wfq", **{"with": "x: 1"})
        await act("swap", kind="scheduling", use="wfq")
        hashes = f"policies: [{{use: api_key, with: {{keys: [{{hash: '{HASH}', tenant: beta}}]}}}}]"
        await act("swap", kind="auth", use="chain", **{"with": hashes})
        await act("shadow", kind="scheduling", use="fcfs", seconds="60")
        await act("end_shadow")
        await act("end_shadow", 409)
        await act("drain", worker=site.dispatcher.workers[0].name)
        log = (await site.admin.get("/admin/audit", headers={"authorization": "Bearer another"})).json()["entries"]
    assert [(entry["action"], entry["subject"]) for entry in reversed(log)] == [
        ("cache.purge", "tenant:alpha"),
        ("request.cancel", f"request:{job}"),
        ("policies.swap", "policies"),
        ("policies.swap", "policies"),
        ("policies.shadow", "policies"),
        ("policies.shadow", "policies"),
        ("worker.drain", "worker:echo/local-0"),
    ]
    assert {(entry["actor"]["name"], entry["actor"]["via"]) for entry in log} == {("ann", "console")}
    receipt = json.loads(unescape(re.search(r"<pre[^>]*>(.*?)</pre>", purged, re.DOTALL).group(1)))  # type: ignore[union-attr]
    assert log[-1]["after"] == receipt
    assert log[-3]["before"]["scheduling"]["use"] == "fcfs"
    assert log[-3]["after"] == {"scheduling": {"use": "wfq", "with": {}}}
    assert HASH not in json.dumps(log)


async def test_an_ended_request_tells_its_caller(shared: Site) -> None:
    """Queued, running whole and running as a stream: each ends with the operator's word, and gives its slot back."""
    async with visitor(shared) as mine, shared.stream(max_tokens=2000) as stream:
        whole = asyncio.create_task(shared.complete("beta", max_tokens=2000))
        await until(lambda: len([t for t in tickets(shared) if t.first_token_at]) == 2, "both run")
        for ticket in tickets(shared):
            answer = await mine.post("/console/actions/cancel", job=ticket.job.id)
            assert (answer.status_code, ticket.job.id in answer.text) == (200, True)
        refusal = await whole
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (403, "cancelled_by_operator")
        body = (await stream.aread()).decode()
        assert events(body)[-1]["error"]["code"] == "cancelled_by_operator"
        assert "[DONE]" not in body

        many = [asyncio.create_task(shared.complete("beta", max_tokens=300)) for _ in range(14)]
        await until(lambda: any(t.state is TicketState.QUEUED for t in tickets(shared)), "one waits")
        waiting = next(t for t in tickets(shared) if t.state is TicketState.QUEUED)
        assert (await mine.post("/console/actions/cancel", job=waiting.job.id)).status_code == 200
        for ticket in tickets(shared):
            await mine.post("/console/actions/cancel", job=ticket.job.id)
        assert {(await call).status_code for call in many} == {403}
        await shared.at_rest()
        assert (await mine.post("/console/actions/cancel", job=waiting.job.id)).status_code == 404
        ended = text((await mine.get("/console/requests")).text)
        assert "cancelled cancelled_by_operator" in ended


async def test_check_changes_nothing_and_names_every_mistake(shared: Site) -> None:
    generation = shared.gateway.parts.runtime.current.generation
    async with visitor(shared) as mine:
        for use, settings, status, words in (
            ("vtc", "output_cost: 3", 200, ["No mistakes"]),
            ("vtc", "", 200, ["No mistakes"]),
            ("vtc", "{output_cost: -1, speed: fast}", 422, ["with.output_cost", "with.speed"]),
            ("nonsense", "", 422, ["nonsense", "vtc"]),
            ("vtc", "[1, 2]", 422, ["must be a mapping"]),
            ("vtc", "a: [", 422, ["not valid YAML"]),
            ("vtc", "a: 1\na: 2", 422, ["with"]),
            ("", "", 422, ["use"]),
        ):
            answer = await mine.post("/console/actions/check", kind="scheduling", use=use, **{"with": settings})
            assert answer.status_code == status, (use, settings)
            for word in words:
                assert word in text(answer.text), (use, settings, word)
        assert (await mine.post("/console/actions/check", kind="everything")).status_code == 400
    assert shared.gateway.parts.runtime.current.generation == generation


async def test_a_swap_keeps_what_waits(shared: Site) -> None:
    calls = [asyncio.create_task(shared.complete(max_tokens=40)) for _ in range(14)]
    await until(lambda: len(shared.dispatcher.queue) >= 2, "some wait")
    before = shared.gateway.parts.runtime.current.generation
    async with visitor(shared) as mine:
        wrong = await mine.post("/console/actions/swap", kind="scheduling", use="vtc", **{"with": "x: 1"})
        assert (wrong.status_code, shared.gateway.parts.runtime.current.generation) == (422, before)
        answer = await mine.post("/console/actions/swap", kind="scheduling", use="wfq", **{"with": ""})
        assert answer.status_code == 200
        assert f"Generation {before + 1}" in text(answer.text)
        assert "scheduling wfq" in text((await mine.get("/console/policies")).text)
    assert {(await call).status_code for call in calls} == {200}
    await shared.at_rest()


async def test_a_candidate_watches_and_then_takes_over(shared: Site) -> None:
    """What it would have done is on the page while it watches; the operator can end it; else it is swapped in."""
    runtime = shared.gateway.parts.runtime
    wrong: dict[str, tuple[dict[str, str], int]] = {
        "no time": ({"kind": "scheduling", "use": "fcfs", "seconds": "0"}, 400),
        "no number": ({"kind": "scheduling", "use": "fcfs", "seconds": "a while"}, 400),
        "no end": ({"kind": "scheduling", "use": "fcfs", "seconds": "inf"}, 400),
        "wrong kind": ({"kind": "routing", "use": "round_robin", "seconds": "5"}, 400),
        "mistake": ({"kind": "scheduling", "use": "vtc", "with": "x: 1", "seconds": "5"}, 422),
    }
    async with visitor(shared) as mine:
        for what, (fields, status) in wrong.items():
            assert (await mine.post("/console/actions/shadow", **fields)).status_code == status, what
        assert (await mine.post("/console/actions/end_shadow")).status_code == 409
        assert runtime.trial is None

        begun = await mine.post("/console/actions/shadow", kind="scheduling", use="fcfs", seconds="60")
        assert begun.status_code == 200, text(begun.text)
        calls = [asyncio.create_task(shared.complete(who, max_tokens=4)) for who in ("alpha", "beta") * 8]
        assert {(await call).status_code for call in calls} == {200}
        page = text((await mine.get("/console/policies")).text)
        assert "Shadow run of fcfs running" in page
        assert "Dispatches 16" in page
        assert "alpha 8" in page
        assert "not the shares it would give" in page
        assert (await mine.post("/console/actions/end_shadow")).status_code == 200
        assert "cancelled" in text((await mine.get("/console/policies")).text)

        await mine.post("/console/actions/shadow", kind="scheduling", use="fcfs", seconds="1")
        await until(lambda: runtime.current.uses["scheduling"].use == "fcfs", "it took over")
        await until(lambda: runtime.trial is not None and runtime.trial.state == "switched", "the trial says so")
        assert "switched" in text((await mine.get("/console/policies")).text)
    await shared.at_rest()


async def test_a_masked_secret_stays_as_it_is(shared: Site) -> None:
    """The form shows no key; sent back unchanged it keeps the key; a mask with nothing behind it is a mistake."""
    async with visitor(shared) as mine:
        page = (await mine.get("/console/policies?kind=auth")).text
        assert HASH not in page
        form = unescape(re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL).group(1))  # type: ignore[union-attr]
        assert "***" in form
        swapped = await mine.post("/console/actions/swap", kind="auth", use="chain", **{"with": form})
        assert swapped.status_code == 200, text(swapped.text)
        kept = shared.gateway.parts.runtime.current.uses["auth"].with_
        assert kept["policies"][1]["with"]["keys"][0]["hash"] == HASH
        nothing = await mine.post(
            "/console/actions/swap", kind="auth", use="api_key", **{"with": "keys: [{hash: '***', tenant: beta}]"}
        )
        assert nothing.status_code == 422
        assert "with.keys[0].hash" in text(nothing.text)


async def test_to_htmx_a_fragment_to_a_form_a_page(shared: Site) -> None:
    async with visitor(shared) as mine:
        fields = {"csrf": mine.csrf, "kind": "scheduling", "use": "vtc", "back": "/console/policies"}
        page = await mine.raw("/console/actions/check", fields, {"origin": mine.origin})
        assert "<html" in page.text
        assert 'href="/console/policies"' in page.text
        fragment = await mine.raw("/console/actions/check", fields, {"origin": mine.origin, "hx-request": "true"})
        assert "<html" not in fragment.text
        elsewhere = {**fields, "back": "https://evil.example"}
        assert "evil" not in (await mine.raw("/console/actions/check", elsewhere, {"origin": mine.origin})).text


async def test_a_drained_worker_finishes_and_comes_back(start: Start) -> None:
    async with start(echo=Echo(step_s=0.02)) as site, visitor(site) as mine:
        (before,) = site.dispatcher.workers
        running = asyncio.create_task(site.complete(max_tokens=120))
        await until(lambda: site.dispatcher.in_flight, "it runs")
        answer = await mine.post("/console/actions/drain", worker=before.name)
        assert (answer.status_code, f"{before.name} drains" in answer.text) == (200, True)
        assert "draining" in (await mine.get("/console/workers")).text
        late = asyncio.create_task(site.complete("beta", max_tokens=4))
        assert (await running).status_code == 200
        assert (await late).status_code == 200, "it waited for the worker that was started afresh"
        (after,) = site.dispatcher.workers
        assert (after.name, after.incarnation) == (before.name, 2)
        assert "stopped: drained" in text((await mine.get("/console/workers")).text)
        assert (await mine.post("/console/actions/drain", worker="nobody")).status_code == 404


async def test_reload_reads_the_file_or_says_why_not(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    kept = {"state": {"path": "state"}}
    launch = merged(BASE, kept)
    path.write_text(yaml.safe_dump(launch))
    async with start(kept, ready=False, config_path=path) as site, visitor(site) as mine:
        path.write_text(yaml.safe_dump({**launch, "tenants": [{"id": "gamma", "weight": 7}]}))
        done = await mine.post("/console/actions/reload")
        assert (done.status_code, "In force now tenants" in text(done.text)) == (200, True)
        assert "gamma" in (await mine.get("/console/tenants")).text
        path.write_text(yaml.safe_dump({**launch, "tenants": [{"id": "gamma", "wait": 7}]}))
        wrong = await mine.post("/console/actions/reload")
        assert wrong.status_code == 422
        assert "tenants[0].wait" in text(wrong.text)
        assert "gamma" in (await mine.get("/console/tenants")).text
        [entry] = (await site.admin.get("/admin/audit")).json()["entries"]
        assert (entry["action"], entry["actor"]["via"]) == ("config.reload", "console"), "once, as the operator's"
    async with start(ready=False) as site, visitor(site) as mine:
        assert "not started from a file" in text((await mine.post("/console/actions/reload")).text)
