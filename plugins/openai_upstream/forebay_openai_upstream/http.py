"""Connections to one server.

Rules
- Every header is made here: the gateway hands over none of the caller's, and cookies are not kept.
- Connections are pooled. A server may close an idle one at the very moment it is used again: a request that dies at
  once, on a *reused* connection, before any byte of an answer, is sent again on a fresh one. Any other failure is the
  gateway's to judge: it knows whether the caller got a byte, and what its retry budget is.
- Redirects are not followed: they could lead anywhere with the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from forebay_openai_upstream.config import UpstreamConfig

STALE_S = 1.0
"""A stale connection fails at once; what fails later was being worked on."""
READ_SIZE = 2**16


@dataclass(slots=True)
class _Mark:
    connected: Callable[[], None]
    reused: bool = False


class Connections:
    """Two sessions: one that keeps connections, one that never does. Belongs to the event loop."""

    def __init__(self, config: UpstreamConfig, key: str | None) -> None:
        self._config = config
        self._headers = {**config.headers, "accept-encoding": "identity"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._tls: ssl.SSLContext | bool = ssl.create_default_context(cafile=config.ca_file) if config.ca_file else True
        self._pooled = self._session(keep=config.keepalive_s > 0)
        self._fresh = self._session(keep=False)

    @contextlib.asynccontextmanager
    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], connected: Callable[[], None]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; yields the answer once its headers are there. Leaving closes what was not read to its end.

        ``connected`` is called when the connection stands, also for a second one.
        Raises aiohttp.ClientError, TimeoutError (only for the connection's own limit).
        """
        url = self._config.url + path
        given = {"content-type": "application/json", "accept": "text/event-stream, application/json", **headers}
        options: dict[str, Any] = {"data": body, "headers": given, "allow_redirects": False}
        mark, began = _Mark(connected), asyncio.get_running_loop().time()
        try:
            response = await self._pooled.post(url, trace_request_ctx=mark, **options)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not mark.reused or asyncio.get_running_loop().time() - began > STALE_S:
                raise
            response = await self._fresh.post(url, trace_request_ctx=_Mark(connected), **options)
        try:
            yield response
        finally:
            # Closed, not released: what is unread would otherwise be waited for, and the server would go on.
            if not response.content.at_eof():
                response.close()
            response.release()

    async def answers(self) -> int:
        """The status of ``GET /models``. Raises aiohttp.ClientError, TimeoutError."""
        options = {"allow_redirects": False}
        async with asyncio.timeout(self._config.connect_s * 2):
            async with self._fresh.get(f"{self._config.url}/models", **options) as response:  # type: ignore[arg-type]
                return response.status

    async def close(self) -> None:
        """Close every connection."""
        await self._pooled.close()
        await self._fresh.close()

    def _session(self, *, keep: bool) -> aiohttp.ClientSession:
        limits: dict[str, Any] = {"keepalive_timeout": self._config.keepalive_s} if keep else {"force_close": True}
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_reused)
        trace.on_connection_create_end.append(_created)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._tls, **limits),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._config.connect_s),
            headers=self._headers,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
            trust_env=False,
            read_bufsize=READ_SIZE,
            auto_decompress=False,
        )


async def _reused(_: aiohttp.ClientSession, context: Any, __: Any) -> None:
    mark = context.trace_request_ctx
    if mark is not None:
        mark.reused = True
        mark.connected()


async def _created(_: aiohttp.ClientSession, context: Any, __: Any) -> None:
    mark = context.trace_request_ctx
    if mark is not None:
        mark.connected()
