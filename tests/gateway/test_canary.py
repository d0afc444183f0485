"""Marked words go through every kind of request with everything switched on, and must be found nowhere afterwards.

security: prompts, answers, users, keys and tokens in logs (debug), spans, metrics, error bodies, the admin API, console
pages and files. The echo worker answers with the prompt, so an answer is marked as well.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import log
from tests.gateway.conftest import Start
from tests.gateway.console.browser import PAGES, visitor
from tests.gateway.harness import KEY, MODEL, Site, pool, tickets, token, until
from tests.gateway.logs import undisturbed
from tests.gateway.test_adapters import ROOM, write
from tests.otlp import OtlpReceiver, ReceivedSpan
from workers.testing import Echo

PROMPT = "canary-prompt-6f1d"
USER = "canary-user-77aa"
FIELD = "canary-field-3c09"
NAME = "canary-name-e81b"
"""Of a model, a type, a tool: told back to the caller who got it wrong, and to nobody else."""
HEADER = "canary-header-b2e4"
SECRET = "canary-admin-token-91f0-at-least-32-bytes"
SERVER_SECRET = "canary-server-secret-5d21-at-least-32"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"Say {PROMPT} and {PROMPT}!"}],
    "max_tokens": 60,
    "ignore_eos": True,
    "user": FIELD,
    "stop": [FIELD],
    "metadata": {"note": FIELD},
    "cache_salt": FIELD,
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": f"Say {PROMPT}", "max_tokens": 60, "user": FIELD, "stop": [FIELD]},
    "/v1/responses": {
        "model": MODEL,
        "instructions": PROMPT,
        "input": f"Say {PROMPT}",
        "max_output_tokens": 60,
        "user": FIELD,
        "metadata": {"note": FIELD},
    },
}
"""Other endpoints, and what they are sent."""
ARGUMENTS = json.dumps({FIELD: PROMPT})
SHAPED: list[dict[str, Any]] = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": NAME, "schema": {"type": "object", "properties": {FIELD: {"const": PROMPT}}}},
        }
    },
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": FIELD, "properties": {FIELD: {"$ref": f"#/{FIELD}"}}}},
        }
    },
    {"response_format": {"type": NAME}},
    {"structured_outputs": {"regex": f"({FIELD}"}},
    {"structured_outputs": {"grammar": f"start: {FIELD}"}},
    {"structured_outputs": {"choice": [PROMPT, FIELD]}},
    {
        "tools": [{"type": "function", "function": {"name": "find", "description": PROMPT, "parameters": {}}}],
        "messages": [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "tool_calls": [
                {"id": FIELD, "type": "function", "function": {"name": "find", "arguments": ARGUMENTS}}
            ]},
            {"role": "tool", "tool_call_id": FIELD, "content": PROMPT},
        ],
    },
    {"tools": [{"type": "function", "function": {"name": f"{NAME} {NAME}", "parameters": {"type": FIELD}}}]},
    {"tool_choice": {"type": "function", "function": {"name": NAME}}},
    {"use_beam_search": True, "n": 2, "best_of": 2, "max_tokens": 8},
    {"model": "law", "seed": 7},
    {"model": f"law:{NAME}"},
]  # fmt: skip
"""Grammars, tools, beams, an adapter: well formed and not. What becomes of them is another test's business."""
SETTINGS: dict[str, Any] = {
    "tenants": [{"id": "alpha"}, {"id": "beta"}, {"id": "single", "limits": {"concurrent": 1}}],
    "models": [pool(max_running=1)],
    "policies": {"scheduling": {"use": "vtc"}},
}


def credential(tenant: str) -> str:
    """A token whose user is marked."""
    return token(tenant, sub=USER)


class Caller:
    """Sends marked requests and keeps every error body."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.errors: list[str] = []

    async def post(self, tenant: str = "alpha", content: bytes | None = None, **changes: Any) -> httpx.Response:
        """One chat request."""
        return await self.send("/v1/chat/completions", content or json.dumps({**BODY, **changes}).encode(), tenant)

    async def send(self, path: str, content: bytes, tenant: str = "alpha") -> httpx.Response:
        """One request."""
        answer = await self.site.http.post(f"{path}?q={HEADER}", content=content, headers=self.headers(tenant))
        if answer.status_code >= 400:
            self.errors.append(answer.text + repr(answer.headers))
        return answer

    @staticmethod
    def headers(tenant: str) -> dict[str, str]:
        """A marked credential and marked headers."""
        return {
            "authorization": f"Bearer {credential(tenant)}",
            "content-type": "application/json",
            "user-agent": HEADER,
            "baggage": f"note={HEADER}",
            "x-anything": HEADER,
        }

    async def every_kind(self) -> None:
        """Ok, streamed, cancelled, throttled, refused, unknown, unauthenticated."""
        answer = await self.post()
        assert answer.status_code == 200
        assert PROMPT in answer.text, "the answer is marked too"
        streamed = await self.post(stream=True)
        assert PROMPT[:6] in streamed.text
        for path, body in OTHERS.items():
            for stream in (False, True):
                answer = await self.send(path, json.dumps({**body, "stream": stream}).encode())
                assert answer.status_code == 200, answer.text
                assert PROMPT[:6] in answer.text, path
            assert (await self.send(path, json.dumps({**body, "temperature": FIELD}).encode())).status_code == 400
        for fields in SHAPED:
            assert (await self.post(**fields)).status_code != 500, fields
        for path in ("/tokenize", "/detokenize"):
            await self.send(path, json.dumps({"model": MODEL, "prompt": PROMPT, "tokens": [FIELD]}).encode())
        for stream in (False, True):
            call = asyncio.create_task(self.post(max_tokens=900, stream=stream))
            await until(lambda: any(ticket.first_token_at for ticket in tickets(self.site)), "it runs")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await self.site.at_rest()
        holds = asyncio.create_task(self.post("single", max_tokens=900))
        await until(lambda: self.site.slots("single") == 1, "its slot is taken")
        assert (await self.post("single")).status_code == 429
        holds.cancel()
        await asyncio.gather(holds, return_exceptions=True)
        assert (await self.post("stranger")).status_code == 403
        assert (await self.post(n=-1)).status_code == 400
        assert (await self.post(logit_bias={"1": 500})).status_code == 400
        assert (await self.post(messages=[{"role": "user", "content": PROMPT * 2_000}])).status_code == 400
        assert (await self.post(content=b'{"messages": "' + PROMPT.encode() + b'"')).status_code == 400
        assert (await self.post(model="nope")).status_code == 404
        nobody = await self.site.http.post(
            "/v1/chat/completions", json=BODY, headers={"authorization": f"Bearer {FIELD}"}
        )
        assert nobody.status_code == 401
        self.errors.append(nobody.text)
        await self.site.at_rest()


async def used(site: Site, quota: str) -> str:
    """What caller and operator are told of usage: with a ledger also who used what, thus users."""
    mine = await site.http.get("/v1/usage", headers=Caller.headers("alpha"))
    assert mine.status_code == 200
    pages = [mine.text]
    for query in ("group_by=tenant,user,model,class,day", "group_by=user&format=csv"):
        answer = await site.admin.get(f"/admin/usage?{query}", headers={"authorization": f"Bearer {SECRET}"})
        assert (answer.status_code == 200) is (quota == "ledger"), answer.text
        pages.append(answer.text)
    return "".join(pages)


async def told(site: Site) -> str:
    """Everything an operator can read over HTTP, while a marked request runs."""
    call = asyncio.create_task(Caller(site).post(max_tokens=900))
    await until(lambda: site.dispatcher.in_flight, "it runs")
    try:
        async with visitor(site) as mine:
            await mine.get("/console/login")
            assert (await mine.post("/console/login", token=SECRET)).status_code == 303
            pages = [(await mine.get(path)).text for path in PAGES]
            pages.append((await mine.post("/console/actions/purge", tenant="alpha")).text)
        admin = {"authorization": f"Bearer {SECRET}"}
        for path in ("tenants", "queue", "workers", "policies", "overview", "audit"):
            answer = await site.admin.get(f"/admin/{path}", headers=admin)
            assert answer.status_code == 200, path
            pages.append(answer.text)
        openmetrics = {"accept": "application/openmetrics-text; version=1.0.0", **admin}
        pages.append((await site.admin.get("/metrics", headers=openmetrics)).text)
        workers = (await site.admin.get("/admin/workers", headers=admin)).json()["workers"]
        async with httpx.AsyncClient() as client:
            pages += [(await client.get(f"http://127.0.0.1:{each['metrics_port']}/metrics")).text for each in workers]
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    return "".join(pages)


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Everything that this process logs from debug up, as JSON; as it was afterwards."""
    with undisturbed():
        stream = io.StringIO()
        log.configure("gateway", format="json", level="debug", stream=stream)
        yield stream


def all_there(spans: list[ReceivedSpan], *, apart: bool) -> bool:
    """What a gateway and its workers tell of marked requests has come."""
    names = Counter(span.name for span in spans)
    return names[f"chat {MODEL}"] >= 5 and bool(names["kv transfer"]) >= apart


@pytest.mark.parametrize(("quota", "apart"), [("token_bucket", False), ("ledger", False), ("token_bucket", True)])
async def test_nothing_of_a_request_is_kept_or_told(
    quota: str,
    apart: bool,
    start: Start,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    logged: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    env = {"FOREBAY_ADMIN_TOKEN": SECRET, "FOREBAY_SERVER_SECRET": SERVER_SECRET, log.LEVEL_ENV: "debug"}
    errors: list[str] = []
    with OtlpReceiver() as collector:
        engine: dict[str, Any] = {
            "max_running": 1,
            "adapters": [{"name": "law", "source": write(tmp_path, "law")}],
            **ROOM,
        }
        changes = {
            **SETTINGS,
            "models": [prefill_and_decode(engine) if apart else pool(**engine)],
            "telemetry": {"otlp_endpoint": collector.endpoint, "request_log": "requests.jsonl"},
            "state": {"path": "state"},
            "policies": {**SETTINGS["policies"], "quota": {"use": quota}},
        }
        async with start(changes, echo=Echo(step_s=0.002), env=env) as site:
            caller = Caller(site)
            await caller.every_kind()
            pages, usage = await told(site), await used(site, quota)
            await asyncio.to_thread(collector.wait, partial(all_there, apart=apart))
        async with start(changes, echo=Echo(fail_with="internal"), env=env) as site:
            failing = Caller(site)
            assert (await failing.post()).status_code == 500
            errors = caller.errors + failing.errors
        spans = "\n".join(f"{span}{span.resource}" for span in collector.spans())
    output = capfd.readouterr()
    files = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and "model" not in path.relative_to(tmp_path).parts
    }
    expected = {"requests.jsonl", "state/audit.jsonl", *(["state/ledger.db"] if quota == "ledger" else [])}
    assert expected <= {str(path.relative_to(tmp_path)) for path in files}
    logs = logged.getvalue() + output.out + output.err
    assert logs.count('"event": "request"') > 12
    assert ("kv transfer" in spans) is apart
    assert ('forebay_kv_transfer_seconds_count{result="ok"}' in pages) is apart
    assert len(errors) >= 9
    encoded = ", ".join(str(number) for number in _ids(tmp_path)[1:6])
    signature = credential("alpha").split(".")[2][:20]
    marks = [PROMPT, USER, FIELD, NAME, HEADER, SECRET, SERVER_SECRET, KEY, encoded, signature]
    places = {"logs": logs, "spans": spans, "pages and metrics": pages, "errors": "\n".join(errors)}
    places |= {str(path.relative_to(tmp_path)): content.decode("latin-1") for path, content in files.items()}
    places["usage"] = usage
    found = {(mark, place) for place, text in places.items() for mark in marks if mark in text}
    ledger = {place for place in places if place.startswith("state/ledger.db")}
    assert any((USER, place) in found for place in ledger) is (quota == "ledger"), "its files are searched"
    # Who used how much is what a ledger and the usage pages are for; what was asked is in neither.
    assert {(mark, place) for mark, place in found if place not in {"usage", *ledger}} == {(NAME, "errors")}
    assert {mark for mark, _ in found} == {USER, NAME}


def prefill_and_decode(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The model in two workers: every prompt but the shortest moves from one to the other."""
    roles: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {"transfer": {"min_tokens": 16}}}
    return {
        **pool(),
        "pools": [
            {"name": role, "launch": {"use": "echo"}, "engine": {"blocks": 256, "role": role, **engine, **more}}
            for role, more in roles.items()
        ],
    }


def _ids(folder: Path) -> list[int]:
    """The prompt as token ids: that would be content as well."""
    from workers.tokenizer import Tokenizer

    return list(Tokenizer.load(folder / "model").encode_text(PROMPT))


def test_the_marks_would_be_seen(logged: io.StringIO) -> None:
    """The search itself works: what is written to a line of ours by mistake is found in it."""
    log.get("test").debug("mistake", text=PROMPT)
    assert PROMPT in logged.getvalue()
