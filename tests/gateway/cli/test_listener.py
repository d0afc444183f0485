"""The listener: limits that the HTTP server itself does not have, and ports that are taken."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.cli import listener as module
from gateway.cli.listener import MAX_HEADER_BYTES, MAX_HEADERS, SLICE_BYTES, Listener, bind, url_of
from gateway.cli.output import UserError
from gateway.http.middleware import LAST


async def hello(request: Request) -> JSONResponse:
    return JSONResponse({"body": len(await request.body())})


async def stream(_: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"piece;"
            await asyncio.sleep(0.01)

    return StreamingResponse(pieces())


async def flood(_: Request) -> Response:
    return Response(b"x" * 2**25)


APP = Starlette(
    routes=[
        Route("/", hello, methods=["GET", "POST"]),
        Route("/stream", stream, methods=["GET"]),
        Route("/flood", flood, methods=["GET"]),
    ]
)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    bound = bind("127.0.0.1", 0, "listen")
    listener = Listener(APP, bound, max_connections=4)
    address = url_of(bound)
    await listener.start()
    yield address
    await listener.stop(force=True)


async def talk(url: str, *parts: bytes) -> tuple[bytes, bytes]:
    """Send ``parts`` over one connection; head and body of what comes back until it closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


async def test_an_ordinary_request_passes(url: str) -> None:
    async with httpx.AsyncClient() as client:
        answers = [await client.post(url, content=b"x" * 200_000) for _ in range(3)]
    assert [answer.json() for answer in answers] == [{"body": 200_000}] * 3


async def test_too_many_headers_are_refused(url: str) -> None:
    """security 51: 10,000 headers."""
    many = b"".join(b"x-%d: 1\r\n" % i for i in range(MAX_HEADERS + 1))
    head, body = await talk(url, b"GET / HTTP/1.1\r\nhost: x\r\n" + many + b"\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "bad_http"


async def test_a_header_that_never_ends_is_cut_off(url: str) -> None:
    """security 51: a 1 MB header; what came before the limit is all that is held."""
    pieces = [b"a" * 16_384] * (MAX_HEADER_BYTES // 16_384 + 1)
    head, _ = await talk(url, b"GET / HTTP/1.1\r\nx: ", *pieces)
    assert head.startswith(b"HTTP/1.1 431 ")


async def test_one_large_header_in_one_piece_is_refused(url: str) -> None:
    head, _ = await talk(url, b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")


async def test_headers_have_a_time_limit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADER_TIMEOUT_S", 0.05)
    head, _ = await talk(url, b"GET / HTTP/1.1\r\nhost:")
    assert head.startswith(b"HTTP/1.1 408 ")


async def test_what_is_no_http_gets_a_json_error(url: str) -> None:
    head, body = await talk(url, b"\x16\x03\x01\x02\x00\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "second",
    [
        b"\x00nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nx : y\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEADER_BYTES + SLICE_BYTES),
    ],
    ids=["no http", "bad header", "large header"],
)
@pytest.mark.parametrize("apart", [True, False])
async def test_a_bad_second_request_leaves_the_first_ones_answer_whole(url: str, second: bytes, apart: bool) -> None:
    """Nothing of its refusal gets into the answer; the connection ends behind it."""
    first = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"
    head, body = await talk(url, *((first, second) if apart else (first + second,)))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b"6\r\npiece;\r\n" * 20 + b"0\r\n\r\n"


async def test_a_late_second_request_leaves_the_first_ones_answer_whole(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEADER_TIMEOUT_S", 0.05)
    head, body = await talk(url, b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\nGET / HT")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b"6\r\npiece;\r\n" * 20 + b"0\r\n\r\n"


async def test_blank_lines_do_not_hold_a_connection(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADER_TIMEOUT_S", 0.2)
    head, body = await talk(url, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in body


@pytest.mark.parametrize("apart", [True, False])
async def test_a_request_that_offers_an_upgrade_keeps_its_body(url: str, apart: bool) -> None:
    """What Java's HTTP client sends; the request behind it is served as well."""
    offer = (
        b"POST / HTTP/1.1\r\nhost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nContent-Length: 5\r\n\r\n"
    )
    close = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: websocket\r\n\r\n"
    head, body = await talk(url, *((offer, b"12", b"345", close) if apart else (offer + b"12345" + close,)))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body.startswith(b'{"body":5}HTTP/1.1 200 ')
    assert body.endswith(b'{"body":0}')


async def test_an_http_1_0_client_gets_no_chunks(url: str) -> None:
    """It would take the chunks' sizes for text. The end of the answer is the end of the connection."""
    head, body = await talk(url, b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"piece;" * 20
    head, body = await talk(url, b"GET / HTTP/1.0\r\n\r\n")
    assert b"content-length: 10" in head
    assert body == b'{"body":0}'


async def test_an_http_1_0_request_behind_another_one_gets_no_chunks(url: str) -> None:
    _, body = await talk(url, b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET /stream HTTP/1.0\r\n\r\n")
    first, _, rest = body.partition(b"HTTP/1.1 200 OK")
    assert first == b'{"body":0}'
    assert rest.partition(b"\r\n\r\n")[2] == b"piece;" * 20


@pytest.mark.parametrize("size", [4096, 262_144])
async def test_many_small_requests_at_once_are_no_large_header(url: str, size: int) -> None:
    """Pipelined: more than the limit for headers in one piece, cut inside a request's headers."""
    one = b"GET / HTTP/1.1\r\nhost: x\r\nx-filler: " + b"f" * 200 + b"\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    data = one * 400 + last
    _, body = await talk(url, *(data[start : start + size] for start in range(0, len(data), size)))
    assert body.count(b'{"body":0}') == 401
    assert b"431" not in body


async def test_headers_behind_others_are_still_limited(url: str) -> None:
    small = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    _, body = await talk(url, small * 3 + b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEADER_BYTES + 2 * SLICE_BYTES))
    assert body.count(b'{"body":0}') == 3, "the answers before it stay whole"
    assert b"HTTP/1.1 431" not in body


async def test_this_is_no_proxy(url: str) -> None:
    head, _ = await talk(url, b"CONNECT other:80 HTTP/1.1\r\nhost: other:80\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")


async def test_a_peer_that_never_reads_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be held, with what is left to send, until the peer's machine goes away."""
    monkeypatch.setattr(module, "STALLED_PEER_S", 1)
    bound = bind("127.0.0.1", 0, "listen")
    listener = Listener(APP, bound)
    await listener.start()
    with socket.create_connection(bound.getsockname()) as peer:
        peer.sendall(b"GET /flood HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(30):
            while not listener.server_state.total_requests:
                await asyncio.sleep(0.01)
            while listener.server_state.connections:
                await asyncio.sleep(0.05)
    await listener.stop(force=True)


async def test_the_last_request_of_a_turn_knows_that_it_is() -> None:
    """Of those that one turn of the loop read, and alone."""
    told: list[bool] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        last = scope["extensions"][LAST]
        told.append(last())
        await asyncio.sleep(0)
        assert last()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    bound = bind("127.0.0.1", 0, "listen")
    listener = Listener(app, bound)
    host, port = url_of(bound).removeprefix("http://").split(":")
    await listener.start()
    try:
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for together in (connections, connections[:1]):
            told.clear()
            for _, writer in together:
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            for reader, _ in together:
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            assert told == [False] * (len(together) - 1) + [True]
        for _, writer in connections:
            writer.close()
    finally:
        await listener.stop(force=True)


async def test_more_connections_than_allowed_get_503(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
    async with httpx.AsyncClient() as client:
        answer = await client.get(url)
    for _, writer in held:
        writer.close()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "too_many_connections"
    assert answer.headers["retry-after"] == "1"


def test_a_taken_port_is_named_with_its_yaml_path() -> None:
    first = bind("127.0.0.1", 0, "listen")
    first.listen()
    port = first.getsockname()[1]
    with pytest.raises(UserError, match=rf"admin\.port: {port} on 127\.0\.0\.1 is already taken"):
        bind("127.0.0.1", port, "admin")
    first.close()


def test_a_foreign_host_is_named_with_its_yaml_path() -> None:
    with pytest.raises(UserError, match=r"listen\.host: '192\.0\.2\.1' is not an address of this machine"):
        bind("192.0.2.1", 0, "listen")
