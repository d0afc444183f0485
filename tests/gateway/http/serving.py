"""A real uvicorn on a free port around an ASGI application, inside the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """Yields the port."""
    # With the protocol named: asyncio sets TCP_NODELAY only then, and every answer would wait 40 ms without it.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off", server_header=False)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[bound])  # without serve(): its main loop looks for the end only ten times a second
    try:
        yield bound.getsockname()[1]
    finally:
        await server.shutdown(sockets=[bound])


async def raw_request(port: int, data: bytes, *, timeout_s: float = 30.0) -> bytes:
    """Send bytes, return everything until the server closes or stays silent after a complete answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
