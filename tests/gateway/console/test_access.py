"""Who may use the console: sign-in, sessions, CSRF, origins, headers."""

from __future__ import annotations

import asyncio
import re

import pytest

from gateway.errors import ApiError
from gateway.http.console.access import COOKIE, MAX_FAILURES, MAX_SESSIONS, SESSION_S, Access
from gateway.http.operators import Operators
from gateway.settings import Admin
from tests.gateway.conftest import Start
from tests.gateway.console.browser import PAGES, text, visitor
from tests.gateway.harness import Site, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "the operator's secret"
ACTIONS = {
    "purge": {"tenant": "alpha"},
    "drain": {"worker": "echo/local-0"},
    "cancel": {"job": "0" * 24},
    "check": {"kind": "scheduling", "use": "fcfs", "with": ""},
    "swap": {"kind": "scheduling", "use": "vtc", "with": ""},
    "shadow": {"kind": "scheduling", "use": "vtc", "with": "", "seconds": "1"},
    "end_shadow": {"back": "/console"},
    "reload": {"back": "/console"},
}


def untouched(site: Site) -> bool:
    """Whether none of ``ACTIONS`` had an effect."""
    return (
        site.gateway.parts.runtime.current.generation == 1
        and site.gateway.parts.tenants.epoch("alpha") == 0  # type: ignore[arg-type]
        and all(handle.state == "ready" for handle in site.dispatcher.workers)
    )


async def test_every_post_needs_the_csrf_token(shared: Site) -> None:
    """security 35, and beyond: every action, with no token, a wrong one, and another browser's."""
    async with visitor(shared) as mine, visitor(shared) as other:
        assert mine.csrf != other.csrf
        for name, fields in ACTIONS.items():
            for token in (None, "", "0" * 64, "ü", other.csrf):
                form = fields if token is None else {**fields, "csrf": token}
                answer = await mine.raw(f"/console/actions/{name}", form, {"origin": mine.origin})
                assert (answer.status_code, "out of date" in answer.text) == (403, True), (name, token)
        assert untouched(shared)


async def test_requests_from_other_pages_are_refused(shared: Site) -> None:
    """A page on another origin, on another port of this very host, or one that hides where it comes from."""
    async with visitor(shared) as mine:
        for name, fields in ACTIONS.items():
            form = {**fields, "csrf": mine.csrf}
            for headers in (
                {},
                {"origin": "null"},
                {"origin": "http://evil.example"},
                {"origin": "http://127.0.0.1:1"},
                {"origin": f"http://evil.example@{mine.origin.removeprefix('http://')}"},
                {"origin": mine.origin, "sec-fetch-site": "cross-site"},
                {"origin": mine.origin, "sec-fetch-site": "same-site"},
            ):
                answer = await mine.raw(f"/console/actions/{name}", form, headers)
                assert answer.status_code == 403, (name, headers)
        assert untouched(shared)
        for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}):
            for path in (*PAGES, "/console/live/overview"):
                assert (await shared.admin.get(path, headers=headers)).status_code == 403, (path, headers)
        followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await shared.admin.get("/console", headers=followed)).status_code == 200


async def test_without_a_token_only_this_machine_by_its_name(shared: Site) -> None:
    """DNS rebinding: a foreign name that points here is refused, on pages, streams, static files and actions."""
    for path in (*PAGES, "/console/live/overview", "/console/static/console.css", "/console/login"):
        for host in ("evil.example", "127.0.0.1.evil.example", ""):
            assert (await shared.admin.get(path, headers={"host": host})).status_code == 403, (path, host)
    for host in ("localhost:8081", "127.0.0.1", "[::1]:8081"):
        assert (await shared.admin.get("/console", headers={"host": host})).status_code == 200
    assert (await shared.admin.get("/console/login")).headers["location"] == "/console"


async def test_with_a_token_one_has_to_sign_in(start: Start) -> None:
    async with start(env={"FOREBAY_ADMIN_TOKEN": TOKEN}, ready=False) as site, visitor(site) as mine:
        for path in PAGES:
            answer = await mine.http.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
        stream = await mine.http.get("/console/live/overview", headers={"hx-request": "true"})
        assert (stream.status_code, stream.headers["hx-redirect"]) == (401, "/console/login")
        assert (await mine.http.get("/console/static/console.css")).status_code == 200

        await mine.get("/console/login")
        before = mine.http.cookies[COOKIE]
        assert (await mine.post("/console/actions/purge", tenant="alpha")).status_code == 401
        wrong = await mine.post("/console/login", token="wrong")
        assert (wrong.status_code, "That is not the admin token" in text(wrong.text)) == (401, True)
        assert "wrong" not in re.findall(r'value="([^"]*)"', wrong.text)

        entered = await mine.post("/console/login", token=TOKEN)
        assert (entered.status_code, entered.headers["location"]) == (303, "/console")
        cookie = entered.headers["set-cookie"].lower()
        for word in ("httponly", "samesite=strict", "path=/console"):
            assert word in cookie
        assert TOKEN not in cookie
        assert mine.http.cookies[COOKIE] != before, "an id from before the sign-in would be known to whoever set it"
        assert (await mine.get("/console/tenants")).status_code == 200
        assert (await mine.post("/console/actions/check", kind="scheduling", use="fcfs")).status_code == 200

        # The session is for the console only, and ends when its owner says so.
        assert (await mine.http.get("/admin/tenants")).status_code == 401
        assert (await mine.post("/console/logout")).status_code == 303
        assert (await mine.http.get("/console")).status_code == 303
        assert (await mine.post("/console/actions/purge", tenant="alpha")).status_code == 401
        assert site.gateway.parts.tenants.epoch("alpha") == 0  # type: ignore[arg-type]


async def test_sign_in_wants_its_form_too(start: Start) -> None:
    """Else another site could sign a person in to a session that its author knows."""
    async with start(env={"FOREBAY_ADMIN_TOKEN": TOKEN}, ready=False) as site, visitor(site) as mine:
        await mine.get("/console/login")
        for fields, headers in (
            ({"token": TOKEN}, {"origin": mine.origin}),
            ({"token": TOKEN, "csrf": mine.csrf}, {"origin": "http://evil.example"}),
            ({"token": TOKEN, "csrf": mine.csrf}, {}),
        ):
            assert (await mine.raw("/console/login", fields, headers)).status_code == 403
        assert (await mine.http.get("/console")).status_code == 303


async def test_a_stream_ends_with_its_session(start: Start) -> None:
    async with start(env={"FOREBAY_ADMIN_TOKEN": TOKEN}, ready=False) as site, visitor(site) as mine:
        await mine.get("/console/login")
        await mine.post("/console/login", token=TOKEN)
        await mine.get("/console/tenants")
        seen: list[str] = []
        async with asyncio.timeout(30), mine.http.stream("GET", "/console/live/tenants") as answer:
            async for line in answer.aiter_lines():
                if not seen:
                    await mine.post("/console/logout")
                seen.append(line)
        assert "event: forebay:bye" in seen


async def test_wrong_tokens_are_slowed_down(start: Start) -> None:
    async with start(env={"FOREBAY_ADMIN_TOKEN": TOKEN}, ready=False) as site, visitor(site) as mine:
        await mine.get("/console/login")
        for _ in range(MAX_FAILURES):
            assert (await mine.post("/console/login", token="guess")).status_code == 401
        late = await mine.post("/console/login", token=TOKEN)
        assert late.status_code == 429
        assert 1 <= int(late.headers["retry-after"]) <= 60


async def test_every_answer_has_the_headers(shared: Site) -> None:
    """No inline script or style, no frames, nothing cached but the static files."""
    for path in (*PAGES, "/console/nowhere", "/console/static/nothing.js", "/console/actions/purge"):
        headers = (await shared.admin.get(path)).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    for path in PAGES:
        html = (await shared.admin.get(path)).text
        assert not re.search(r"<[^>]+\s(style|on[a-z]+)=", html)
        assert not re.search(r"<script(?![^>]*\ssrc=)", html)
    file = await shared.admin.get("/console/static/console.css")
    assert "immutable" in file.headers["cache-control"]
    again = await shared.admin.get("/console/static/console.css", headers={"if-none-match": file.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_what_is_not_there(shared: Site) -> None:
    for method, path, status in (
        ("GET", "/console/", 404),
        ("GET", "/console/nowhere", 404),
        ("GET", "/console/static/../app.py", 404),
        ("GET", "/console/static/%2e%2e%2fapp.py", 404),
        ("GET", "/console/static/VENDORED.md", 404),
        ("GET", "/console/live/nowhere", 404),
        ("GET", "/consoles", 404),
        ("POST", "/console", 405),
        ("DELETE", "/console/tenants", 405),
        ("POST", "/console/actions/unknown", 404),
    ):
        async with visitor(shared) as mine:
            form = {"csrf": mine.csrf} if method == "POST" else None
            headers = {} if method == "GET" else {"origin": mine.origin}
            answer = await mine.http.request(method, path, data=form, headers=headers)
            assert answer.status_code == status, (method, path)
            assert "Traceback" not in answer.text


async def test_a_form_that_is_none(shared: Site) -> None:
    async with visitor(shared) as mine:
        path, headers = "/console/actions/purge", {"origin": mine.origin}
        json_answer = await mine.http.post(path, json={"csrf": mine.csrf}, headers=headers)
        assert json_answer.status_code == 415
        form = {"content-type": "application/x-www-form-urlencoded", **headers}
        for body in (b"\xff\xfe=%ff", b"&".join(b"a%d=1" % n for n in range(1000))):
            assert (await mine.http.post(path, content=body, headers=form)).status_code == 400
        assert (await mine.http.post(path, content=b"a=" + b"x" * 300_000, headers=form)).status_code == 413


async def test_sessions_end_and_are_bounded() -> None:
    now = [0.0]
    access = Access(Operators({"admin": TOKEN}), clock=lambda: now[0])
    first = access.sign_in(f" {TOKEN}\n", "h")
    assert access.has_session(first)
    now[0] = SESSION_S
    assert not access.has_session(first)
    oldest, *rest = [access.sign_in(TOKEN, "h") for _ in range(MAX_SESSIONS + 1)]
    assert not access.has_session(oldest)
    assert all(access.has_session(session) for session in rest)


async def test_failures_count_per_host_and_fade() -> None:
    now = [0.0]
    access = Access(Operators({"admin": TOKEN}), clock=lambda: now[0])
    for _ in range(MAX_FAILURES):
        with pytest.raises(ApiError, match="not the admin token"):
            access.sign_in("guess", "bad host")
    with pytest.raises(ApiError, match="Too many"):
        access.sign_in(TOKEN, "bad host")
    assert access.sign_in(TOKEN, "good host")
    now[0] = 61.0
    assert access.sign_in(TOKEN, "bad host")


async def test_an_empty_token_never_signs_in() -> None:
    with pytest.raises(ApiError):
        Access(Operators({})).sign_in("", "h")


async def test_streams_are_bounded_and_given_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.console.live.MAX_STREAMS", 1)
    async with start(ready=False) as site:
        url = "/console/live/tenants"
        async with site.admin.stream("GET", url) as first:
            assert first.status_code == 200
            refused = await site.admin.get(url)
            assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)

        async def free() -> bool:
            async with site.admin.stream("GET", url) as answer:
                return answer.status_code == 200

        for _ in range(100):
            if await free():
                break
        else:
            pytest.fail("the closed stream still counts")


async def test_a_drained_gateway_ends_the_streams(start: Start) -> None:
    """An open tab never holds up a stop."""
    async with (
        asyncio.timeout(30),
        start(ready=False) as site,
        site.admin.stream("GET", "/console/live/overview") as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        await site.gateway.drain()
        async for _ in lines:
            pass
        await until(lambda: answer.is_stream_consumed, "the stream is over")


async def test_malformed_origins_and_hosts_are_refused_as_any_other(shared: Site) -> None:
    """They once were faults of ours (500), with a line in the log for each."""
    async with visitor(shared) as mine:
        form = {"csrf": mine.csrf, "back": "/console"}
        for origin in ("http://[", "http://[::1", "]", "http://a b"):
            assert (await mine.raw("/console/actions/reload", form, {"origin": origin})).status_code == 403
    for host in ("[::1", "[", "]", "[::1:8081"):
        assert (await shared.admin.get("/console", headers={"host": host})).status_code == 403
        assert (await shared.admin.get("/admin/queue", headers={"host": host})).status_code == 403
    assert (await shared.admin.get("/console", headers={"host": "127.0.0.1:99999999"})).status_code == 200


async def test_a_token_from_a_file_with_a_line_break_behind_it_works() -> None:
    admin = Admin(operators={"ann": "ANN"})
    operators = Operators.of(admin, {"FOREBAY_ADMIN_TOKEN": "first\n", "ANN": " second\r\n"})
    assert (operators.name_of("first"), operators.name_of("second")) == ("admin", "ann")
    assert not Operators.of(Admin(), {"FOREBAY_ADMIN_TOKEN": " \n"})
    with pytest.raises(ValueError, match=r"admin\.operators\.ann: the variable ANN is not set"):
        Operators.of(admin, {"ANN": "\n"})
    with pytest.raises(ValueError, match="same token"):
        Operators.of(admin, {"FOREBAY_ADMIN_TOKEN": "one", "ANN": "one\n"})
