"""The listener: limits that the HTTP server itself does not have, and ports that are taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway.cli import listener as module
from gateway.cli.listener import MAX_HEADER_BYTES, MAX_HEADERS, Listener, bind, url_of
from gateway.cli.output import UserError


async def hello(request: Request) -> JSONResponse:
    return JSONResponse({"body": len(await request.body())})


APP = Starlette(routes=[Route("/", hello, methods=["GET", "POST"])])


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
        async with asyncio.timeout(10):
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
