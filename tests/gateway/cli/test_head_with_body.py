"""Head and body in one write, and when not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from gateway.cli.head_with_body import HeadWithBody
from gateway.cli.listener import Listener, bind, url_of

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


def body(data: bytes, *, more: bool = False) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Site:
    """A listener around an application that a test writes, and what reached its transport."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[bytes] = []
        self.go_on = asyncio.Event()
        site = self

        class Watched(HeadWithBody):
            def __init__(self, cycle: object, loop: asyncio.AbstractEventLoop) -> None:
                super().__init__(cycle, loop)  # type: ignore[arg-type]
                inner = self._transport

                class Transport:
                    close = inner.close
                    is_closing = inner.is_closing

                    @staticmethod
                    def write(data: bytes) -> None:
                        site.writes.append(data)
                        inner.write(data)

                self._transport = Transport()  # type: ignore[assignment]

        monkeypatch.setattr("gateway.cli.listener.HeadWithBody", Watched)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/expects":
            await receive()
        await send(HEAD)
        if path == "/breaks":
            raise LookupError("no body")
        if path == "/waits":
            await self.go_on.wait()
        if path == "/pieces":
            await send(body(b"one", more=True))
            await send(body(b"two", more=True))
        await send(body(b"end"))


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Site, int]]:
    made, bound = Site(monkeypatch), bind("127.0.0.1", 0, "listen")
    listener = Listener(made, bound)
    port = int(url_of(bound).rpartition(":")[2])
    await listener.start()
    yield made, port
    await listener.stop(force=True)


async def ask(port: int, path: str, method: str = "GET", headers: str = "") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n".encode())
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


async def test_head_and_body_are_one_write(site: tuple[Site, int]) -> None:
    answer = await ask(site[1], "/")
    assert site[0].writes == [answer]
    assert answer.endswith(b"\r\n\r\n3\r\nend\r\n0\r\n\r\n")


async def test_later_pieces_are_writes_of_their_own(site: tuple[Site, int]) -> None:
    await ask(site[1], "/pieces")
    assert len(site[0].writes) == 3
    assert site[0].writes[0].endswith(b"\r\n\r\n3\r\none\r\n")


async def test_a_head_does_not_wait_for_a_body_that_is_not_there_yet(site: tuple[Site, int]) -> None:
    made, port = site
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        made.go_on.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\nend\r\n0\r\n\r\n"
    writer.close()


async def test_the_answer_to_head_is_its_head(site: tuple[Site, int]) -> None:
    answer = await ask(site[1], "/", "HEAD")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


async def test_what_breaks_after_its_head_is_cut_behind_the_head(site: tuple[Site, int]) -> None:
    answer = await ask(site[1], "/breaks")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


async def test_continue_is_no_head(site: tuple[Site, int]) -> None:
    answer = await ask(site[1], "/expects", "POST", "expect: 100-continue\r\ncontent-length: 0\r\n")
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    assert answer.endswith(b"end\r\n0\r\n\r\n")


async def test_a_caller_that_leaves_at_once_breaks_nothing(site: tuple[Site, int]) -> None:
    made, port = site
    with socket.create_connection(("127.0.0.1", port)) as gone:
        gone.sendall(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n")
    made.go_on.set()
    assert (await ask(port, "/")).endswith(b"0\r\n\r\n")
