"""The fetch that policies are lent, against servers that do not mean well: real sockets that drip, redirect and lie."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from email.message import Message

import pytest

from gateway.fetch import MAX_BYTES, _Redirects, fetch_json

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[str]:
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has hung up
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.create_task(talk(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys"
    for task in talks:
        task.cancel()
    await asyncio.gather(*talks, return_exceptions=True)


def dripping(before: bytes) -> Answer:
    """Sends ``before`` and then a byte now and then, for ever."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(before)
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    return answer


def saying(data: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nx-a:",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n{}",
    ],
    ids=["status", "header", "body", "body without length"],
)
async def test_a_server_that_drips_is_given_up_and_its_thread_is_free(before: bytes) -> None:
    """Each byte begins the socket's own time limit anew: only a limit on the whole holds."""
    async with answering(dripping(before)) as url, asyncio.timeout(30):
        with pytest.raises(OSError, match=r"did not answer within|broke off|timed out|Errno"):
            await fetch_json(url, 0.3)


async def test_what_is_answered_in_time_is_parsed_and_redirects_are_followed() -> None:
    async with (
        answering(saying(b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"keys": []}')) as there,
        answering(saying(f"HTTP/1.1 302 Found\r\nlocation: {there}\r\ncontent-length: 0\r\n\r\n".encode())) as here,
    ):
        assert await fetch_json(there) == {"keys": []}
        assert await fetch_json(here) == {"keys": []}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.1 503 Down\r\ncontent-length: 0\r\n\r\n", OSError),
        (b"nonsense\r\n\r\n", OSError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", OSError),
        (b"HTTP/1.1 302 Found\r\nlocation: file:///etc/passwd\r\ncontent-length: 0\r\n\r\n", OSError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{", ValueError),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"1" * (MAX_BYTES + 1), ValueError),
    ],
    ids=["status", "no http", "cut off", "to a file", "no json", "too large"],
)
async def test_anything_else_is_an_error_of_the_kinds_that_are_promised(data: bytes, error: type[Exception]) -> None:
    async with answering(saying(data)) as url:
        with pytest.raises(error):
            await fetch_json(url)


async def test_other_schemes_are_not_fetched() -> None:
    with pytest.raises(ValueError, match="only http and https"):
        await fetch_json("file:///etc/passwd")


def test_no_redirect_leaves_tls() -> None:
    """An open redirect at the provider would else hand its keys over to whoever is on the way."""
    secure = urllib.request.Request("https://idp.example/keys")
    follow = _Redirects().redirect_request
    with pytest.raises(urllib.error.URLError):
        follow(secure, None, 302, "Found", Message(), "http://idp.example/keys")
    assert follow(secure, None, 302, "Found", Message(), "https://other.example/keys") is not None
