"""The client over real sockets, against servers that behave in every way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway.bench.http_client import EventReader, HttpClient, HttpError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[tuple[HttpClient, list[int]]]:
    """A client of a server that answers each connection with ``handler``; and a list that grows per connection."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        yield client, connections
    finally:
        client.close()
        listener.close()
        await listener.wait_closed()


def answers(*bodies: bytes) -> Handler:
    """One answer per request on the connection, then its end."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in bodies:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(body)
            await writer.drain()

    return handle


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with server(answers(OK, OK, OK)) as (client, connections):
        assert [await client.get("/", headers={}) for _ in range(3)] == [b"ok"] * 3
        assert len(connections) == 1


async def test_a_kept_connection_that_is_gone_is_replaced() -> None:
    async with server(answers(OK)) as (client, connections):
        assert await client.get("/", headers={}) == b"ok"
        assert await client.get("/", headers={}) == b"ok"
        assert len(connections) == 2


async def test_close_is_respected() -> None:
    closing = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    async with server(answers(closing, closing)) as (client, connections):
        await client.get("/", headers={})
        await client.get("/", headers={})
        assert len(connections) == 2


async def test_pieces_come_in_order_with_rising_times() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (b"one", b"two"):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with server(handle) as (client, _):
        seen: list[tuple[bytes, float]] = []
        await client.stream("POST", "/x", b"{}", lambda *item: seen.append(item), headers={}, timeout_s=5)
        assert b"".join(data for data, _ in seen) == b"onetwo"
        assert seen[0][1] < seen[-1][1]


async def test_without_a_length_the_end_of_the_connection_is_the_end() -> None:
    async with server(answers(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")) as (client, _):
        assert await client.get("/", headers={}) == b"until the end"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nslow", "http_429"),
        (b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\nlocation: /\r\n\r\n", "http_302"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", "connection"),
        (b"", "connection"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "connection"),
    ],
)
async def test_what_is_no_success_has_a_code(answer: bytes, code: str) -> None:
    async with server(answers(answer)) as (client, _):
        with pytest.raises(HttpError) as caught:
            await client.get("/", headers={})
        assert caught.value.code == code


async def test_silence_is_a_timeout() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up

    async with server(handle) as (client, _):
        with pytest.raises(HttpError) as caught:
            await client.get("/", headers={}, timeout_s=0.05)
        assert caught.value.code == "timeout"


async def test_nobody_listens() -> None:
    async with server(answers(OK)) as (client, _):
        pass
    with pytest.raises(HttpError) as caught:
        await client.get("/", headers={})
    assert caught.value.code == "connection"


async def test_a_header_cannot_smuggle_a_second_one() -> None:
    client = HttpClient("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="line break"):
        await client.get("/", headers={"authorization": "Bearer x\r\nhost: evil"})


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://"])
def test_a_url_must_be_http(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        HttpClient(url)


def test_events_from_any_pieces() -> None:
    whole = b'data: {"a": 1}\n\n: comment\n\nevent: x\ndata:{"b": 2}\r\n\ndata: [DONE]\n\n'
    wanted = [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    for size in range(1, len(whole)):
        reader = EventReader()
        found = [item for at in range(0, len(whole), size) for item in reader.feed(whole[at : at + size])]
        assert found == wanted
