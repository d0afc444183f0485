"""Answers as bytes: the same as uvicorn's, which looks at each header by itself."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.cli.cycle import Cycle

LOG = logging.getLogger("unused")
Header = tuple[bytes, bytes]


class Transport:
    """What was written, and whether it was closed."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True


class Flow:
    """Of a reader that reads."""

    write_paused = False


def start(*headers: Header, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes = b"", more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def outcome(kind: type[RequestResponseCycle], method: str, keep_alive: bool, *messages: dict[str, Any]) -> Any:
    """Bytes, how the connection and the answer ended, and what was raised, if not in which words."""
    transport, ended = Transport(), []
    cycle = RequestResponseCycle(
        scope={"method": method},  # type: ignore[typeddict-item]
        transport=transport,  # type: ignore[arg-type]
        flow=Flow(),  # type: ignore[arg-type]
        logger=LOG,
        access_logger=LOG,
        access_log=False,
        default_headers=[(b"date", b"today")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: ended.append(True),
    )
    cycle.__class__ = kind
    raised = None
    try:
        for message in messages:
            await cycle.send(message)  # type: ignore[arg-type]
    except Exception as error:
        raised = type(error)
    state = cycle.response_started, cycle.response_complete, cycle.keep_alive, cycle.message_event.is_set()
    return transport.data, transport.closed, ended, state, raised


LENGTH = (b"content-length", b"2")
ANSWERS: dict[str, list[dict[str, Any]]] = {
    "whole": [start((b"content-type", b"text/plain"), LENGTH), body(b"ok")],
    "in parts": [start(LENGTH), body(b"o", more=True), body(b"k")],
    "chunks": [start(), body(b"one", more=True), body(more=True), body(b"x" * 300, more=True), body(b"last")],
    "chunks with an empty end": [start((b"Transfer-Encoding", b"Chunked")), body(b"one", more=True), body()],
    "no content": [start(status=204), body()],
    "told to close": [start((b"Connection", b"keep-alive, Close"), LENGTH), body(b"ok")],
    "repeated names": [start((b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), LENGTH), body(b"ok")],
    "a longer body": [start(LENGTH), body(b"more")],
    "a shorter body": [start(LENGTH), body(b"o")],
    "a header in a header": [start((b"x-a", b"1\r\nx-b: 2"), LENGTH), body(b"ok")],
    "a name that is none": [start((b"x a", b"1"), LENGTH), body(b"ok")],
    "a body first": [body(b"ok")],
    "two starts": [start(LENGTH), start(LENGTH)],
    "after the end": [start(LENGTH), body(b"ok"), body(b"ok")],
}


@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_it_writes_and_refuses_what_uvicorn_does(name: str, method: str, keep_alive: bool) -> None:
    messages = ANSWERS[name]
    ours = await outcome(Cycle, method, keep_alive, *messages)
    theirs = await outcome(RequestResponseCycle, method, keep_alive, *messages)
    same = [(data.lower(), *rest) for data, *rest in (ours, theirs)]
    assert same[0] == same[1]
    assert ours[0] == theirs[0]
