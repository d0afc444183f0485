"""An HTTP server that does what a test says, down to the socket: to be the upstream in faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["Exchange"], Awaitable[None]]


@dataclass(slots=True)
class Exchange:
    """One request and the socket it came on."""

    path: str
    headers: dict[str, str]
    body: Any
    connection: int
    """Which connection of the server it came on, counted from 1."""
    _writer: asyncio.StreamWriter
    _reader: asyncio.StreamReader

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: int = 200, length: int | None = None, **headers: str) -> None:
        """The status line and headers; without ``length`` the body ends with the connection."""
        lines = [f"HTTP/1.1 {status} X", "content-type: text/event-stream"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines.append("connection: close" if length is None else f"content-length: {length}")
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def whole(self, body: bytes, status: int = 200, **headers: str) -> None:
        """A complete answer; the connection stays open."""
        await self.head(status, len(body), **headers)
        await self.send(body)

    async def event(self, data: Any) -> None:
        """One server-sent event."""
        await self.send(event(data))

    def close(self) -> None:
        """End the connection in good order."""
        self._writer.close()

    def reset(self) -> None:
        """End the connection with RST."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Return when the other side has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(1024):
                continue


@dataclass(slots=True)
class Scripted:
    """A running scripted server. ``script`` handles every request but ``GET /v1/models``."""

    script: Script
    requests: list[Exchange] = field(default_factory=list)
    connections: int = 0
    idle_s: float | None = None
    """Close a connection that was idle for so long."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                try:
                    async with asyncio.timeout(self.idle_s):
                        head = (await reader.readuntil(b"\r\n\r\n")).decode()
                except TimeoutError:
                    return
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split(" ")[1]
                exchange = Exchange(path, headers, json.loads(body or b"null"), number, writer, reader)
                if path.endswith("/models"):
                    await exchange.whole(b"{}")
                    continue
                self.requests.append(exchange)
                await self.script(exchange)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def scripted(script: Script, *, idle_s: float | None = None) -> AsyncIterator[Scripted]:
    """A server that runs ``script`` for each request."""
    server = Scripted(script, idle_s=idle_s)
    tasks: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(server.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listening = await asyncio.start_server(accepted, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in set(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(data: Any) -> bytes:
    """``data`` as a server-sent event; text goes out as it is."""
    return b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"


def piece(text: str = "", finish: str | None = None, index: int = 0) -> dict[str, Any]:
    """A chunk of a completion's stream."""
    return {"choices": [{"index": index, "text": text, "finish_reason": finish}]}


def usage(prompt: int, output: int, cached: int = 0) -> dict[str, Any]:
    """The chunk with the figures."""
    details = {"cached_tokens": cached}
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details},
    }


def stream(*texts: str, finish: str = "stop", figures: dict[str, Any] | None = None) -> bytes:
    """A whole, good stream."""
    parts = [event(piece(text)) for text in texts] + [event(piece(finish=finish))]
    return b"".join([*parts, event(figures) if figures else b"", event("[DONE]")])
