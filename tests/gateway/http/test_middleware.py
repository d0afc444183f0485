"""The edge on a real server: ids, limits, errors without details, disconnects."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ApiError, throttled, too_large
from gateway.http import middleware
from gateway.http.middleware import exception_handlers, guard, measure_loop_lag, read_body, request_id, watch_disconnect
from tests.gateway.http.serving import raw_request, serving

LIMIT = 100_000
SECRET = "/etc/passwd at 0x7f00deadbeef: my prompt text"


class _OddInternalError(Exception):
    pass


async def echo(request: Request) -> Response:
    body = await read_body(request.receive, LIMIT)
    return PlainTextResponse(f"{len(body)} {request_id(request.scope)}")


async def deny(request: Request) -> Response:
    raise throttled("Too many requests.", "requests_per_minute", 2.5)


async def crash(request: Request) -> Response:
    raise _OddInternalError(SECRET)


async def stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    return StreamingResponse(parts())


async def broken_stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        raise _OddInternalError(SECRET)

    return StreamingResponse(parts())


def app(**extra: Any) -> Any:
    routes = [
        Route("/v1/echo", echo, methods=["POST"]),
        Route("/deny", deny),
        Route("/crash", crash),
        Route("/stream", stream),
        Route("/broken", broken_stream),
        *(Route(path, handler, methods=["POST"]) for path, handler in extra.items()),
    ]
    made = Starlette(routes=routes, exception_handlers=exception_handlers())
    made.router.redirect_slashes = False
    return guard(made, max_body_bytes=LIMIT)


@pytest.fixture
async def server() -> AsyncIterator[int]:
    async with serving(app()) as port:
        yield port


@pytest.fixture
async def client(server: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server}", timeout=30) as made:
        yield made


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


# -- request ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "!~[]{}"])
async def test_a_sane_request_id_is_echoed(client: httpx.AsyncClient, given: str) -> None:
    answer = await client.post("/v1/echo", content=b"12345", headers={"x-request-id": given})
    assert answer.text == f"5 {given}"
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é".encode().decode("latin-1")])
async def test_another_one_is_replaced(client: httpx.AsyncClient, given: str) -> None:
    answer = await client.post("/v1/echo", headers={"x-request-id": given.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.text == f"0 {answer.headers['x-request-id']}"


async def test_every_answer_has_one_and_each_its_own(client: httpx.AsyncClient) -> None:
    paths = ["/stream", "/deny", "/crash", "/nowhere", "/v1/echo"]
    ids = [(await client.get(path)).headers.get_list("x-request-id") for path in paths]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == len(paths)


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_api_errors_keep_status_code_and_retry_after(client: httpx.AsyncClient) -> None:
    answer = await client.get("/deny")
    assert (answer.status_code, error_of(answer)["code"]) == (429, "requests_per_minute")
    assert answer.headers["retry-after"] == "3"


async def test_a_crash_tells_nothing(client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]) -> None:
    """security 57: no path, address, class name or text of an exception; the log has type and place, no text."""
    answer = await client.get("/crash")
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
    for leak in ("passwd", "0x7f", "OddInternal", "Traceback", "prompt", ".py"):
        assert leak not in answer.text
    captured = capsys.readouterr()
    assert "my prompt text" not in captured.out + captured.err


async def test_a_crash_after_the_first_byte_cuts_the_connection(client: httpx.AsyncClient) -> None:
    """gateway C5: a broken stream never looks complete."""
    with pytest.raises(httpx.RemoteProtocolError):
        await client.get("/broken")
    assert (await client.get("/stream")).text == "onetwo"


PATHS = [
    *(
        "/",
        "/v1",
        "/v1/",
        "/v1/echo/",
        "//v1/echo",
        "/v1//echo",
        "/V1/echo",
        "/v1/ech%6f/x",
        "/v1/echo%2f",
        "/v1/echo%00",
    ),
    *(
        "/docs",
        "/openapi.json",
        "/admin/tenants",
        "/metrics",
        "/v1/echo/..%2f..%2fadmin",
        "/v1/../crash2",
        "/crash;x=1",
    ),
]


async def test_unknown_paths_are_json_404_with_every_method(client: httpx.AsyncClient) -> None:
    """gateway D7: aliases, slashes, case and dot segments lead nowhere, and nothing is redirected."""
    for path in PATHS:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            answer = await client.request(method, path)
            assert answer.status_code == 404, (method, path, answer.status_code)
            if method != "HEAD":
                assert error_of(answer)["code"] == "unknown_endpoint"


async def test_a_wrong_method_is_a_json_405_with_allow(client: httpx.AsyncClient) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = await client.request(method, "/v1/echo")
        assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_a_body_at_the_limit_passes_and_one_above_is_refused(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/echo", content=b"x" * LIMIT)).text.startswith(f"{LIMIT} ")
    answer = await client.post("/v1/echo", content=b"x" * (LIMIT + 1))
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert str(LIMIT) in error_of(answer)["message"]


@pytest.mark.parametrize("size", [5_000_000, 27_000_000])
async def test_a_huge_body_is_refused_early_and_the_client_sees_it(client: httpx.AsyncClient, size: int) -> None:
    """security 53: 413 before anything is read into memory; the sender is not cut off while it sends."""
    answer = await client.post("/v1/echo", content=b"x" * size)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")


async def test_a_chunked_body_is_counted_as_it_comes(client: httpx.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 10_000

    answer = await client.post("/v1/echo", content=parts())
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")


async def test_the_refusal_does_not_wait_for_the_body(server: int) -> None:
    """The answer is complete although the sender never sends what it announced."""
    head = b"POST /v1/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 900000000\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server)
    try:
        writer.write(head)
        async with asyncio.timeout(30):
            answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer.lower()
    finally:
        writer.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "gzip, identity", "x"])
async def test_compressed_bodies_are_refused_unread(client: httpx.AsyncClient, encoding: str) -> None:
    """security 47: nothing is ever inflated, with and without Content-Length."""

    async def bomb() -> AsyncIterator[bytes]:
        yield b"\x1f\x8b" + b"\x00" * 1000

    for content in (b"\x1f\x8b" + b"\x00" * 1000, bomb()):
        answer = await client.post("/v1/echo", content=content, headers={"content-encoding": encoding})
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_encoding")


async def test_identity_is_no_encoding(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/echo", content=b"12", headers={"content-encoding": "identity"})
    assert answer.text.startswith("2 ")


@pytest.mark.parametrize(
    "headers",
    [{f"x-{i}": "v" for i in range(500)}, {"x-big": "v" * 100_000}, {f"x-{i}": "v" * 1000 for i in range(90)}],
    ids=["many", "one big", "many bytes"],
)
async def test_too_many_or_too_large_headers_are_431(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    """security 51, behind whatever the server itself limits."""
    answer = await client.post("/v1/echo", headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("value", ["-1", "1e3", "0x10", "9" * 30, "５"])
async def test_a_content_length_that_is_no_number_of_bytes_is_refused(value: str) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/v1/echo", "headers": [(b"content-length", value.encode())]}
    await app()(scope, receive, send)
    assert sent[0]["status"] == 413


async def test_an_unread_body_does_not_break_the_next_request(client: httpx.AsyncClient) -> None:
    """A refusal before the body was read (401, 429) leaves a usable client behind."""
    for _ in range(3):
        refused = await client.post("/crash", content=b"x" * 50_000)
        assert refused.status_code == 405
        assert (await client.post("/v1/echo", content=b"123")).text.startswith("3 ")


async def test_small_requests_are_answered_while_huge_ones_are_refused(client: httpx.AsyncClient) -> None:
    """security 53: refusing 27 MB bodies does not keep the loop from others."""
    lags: list[float] = []
    watch = asyncio.create_task(measure_loop_lag(lags.append, 0.01))
    huge = [client.post("/v1/echo", content=b"x" * 27_000_000) for _ in range(2)]
    small = [client.post("/v1/echo", content=b"1") for _ in range(20)]
    answers = await asyncio.gather(*huge, *small)
    watch.cancel()
    assert [answer.status_code for answer in answers] == [413] * 2 + [200] * 20
    assert lags


# -- helpers -----------------------------------------------------------------------------------------------------------


def script(*messages: Message) -> Receive:
    left: Iterator[Message] = iter(messages)

    async def receive() -> Message:
        return next(left)

    return receive


def part(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_read_body_joins_the_parts() -> None:
    assert await read_body(script(part(b"ab", True), part(b"", True), part(b"c", False)), 3) == b"abc"


async def test_read_body_counts() -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(script(part(b"ab", True), part(b"cd", True)), 3)
    assert caught.value.status == too_large(3).status


async def test_read_body_notices_that_the_caller_left() -> None:
    with pytest.raises(middleware.ClientDisconnect):
        await read_body(script(part(b"ab", True), {"type": "http.disconnect"}), 3)


async def test_watch_disconnect_returns_only_at_the_end() -> None:
    await watch_disconnect(script(part(b"", False), part(b"", False), {"type": "http.disconnect"}))


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_caller_that_leaves_is_noticed(streamed: bool) -> None:
    """gateway C1, C3: through receive(), streamed or not, after the body was read."""
    gone = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive, LIMIT)
        if streamed:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await watch_disconnect(receive)
        gone.set()

    async with serving(guard(slow, max_body_bytes=LIMIT)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        await asyncio.sleep(0.05)
        assert not gone.is_set()
        writer.close()
        async with asyncio.timeout(30):
            await gone.wait()


async def test_a_caller_that_leaves_while_sending_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(app()) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\npart")
        await writer.drain()
        writer.close()
        await asyncio.sleep(0.05)
        answer = await raw_request(port, b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
    assert "request_failed" not in capsys.readouterr().out


async def test_loop_lag_is_measured() -> None:
    times = iter([0.0, 0.3, 1.0, 1.05])
    seen: list[float] = []

    def report(lag: float) -> None:
        seen.append(lag)
        if len(seen) == 2:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await measure_loop_lag(report, 0.1, clock=lambda: next(times))
    assert seen == [pytest.approx(0.2), 0.0]


async def test_a_blocked_loop_shows_as_lag() -> None:
    """gateway F7: the delay between the loop and its timers is measured where it happens."""
    seen: list[float] = []
    task = asyncio.create_task(measure_loop_lag(seen.append, 0.01))
    await asyncio.sleep(0.03)
    time.sleep(0.2)
    await asyncio.sleep(0.03)
    task.cancel()
    assert max(seen) >= 0.1


async def test_other_protocols_pass_through() -> None:
    seen: list[str] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await guard(inner, max_body_bytes=1)({"type": "lifespan"}, script(), _never)
    assert seen == ["lifespan"]


async def _never(message: Message) -> None:
    raise AssertionError(json.dumps(str(message)))
