"""The worker's port, and the certificate that it shows.

Rules
- Renewed files are taken up within ``WATCH_S`` seconds: another gRPC server joins the port (SO_REUSEPORT), then the one
  before takes no more connections and keeps its streams until they end. gRPC's asyncio server cannot change its
  certificate by itself: told to ask for renewed ones, it waits for ever.
- A port that somebody listens at is not joined: whoever may join looks first, and one process of a machine at a time.
- Files that cannot be used are logged, once; the certificate before stays. They are looked at again every time: what
  was wrong may be put right without a trace in ``stamps`` (a mode, an owner), or not lie in them (no descriptor left).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from workers import log
from workers.rpc.tls import Stamps, TlsFiles, TlsFilesError

_log = log.get("worker")

WATCH_S = 2.0
_TURN_S = 10.0
"""How long others may take to open the same port."""
_STREAMS_S = 10 * 365 * 86_400.0
"""How long the streams of a server that was replaced may last."""


class Listener:
    """One port. All methods belong to the event loop."""

    def __init__(self, make: Callable[[bool], grpc.aio.Server], tls: TlsFiles | None) -> None:
        """``make``: a server with its handlers, without a port; whether others of this process may join its port."""
        self._make = make
        self._tls = tls
        self._address = ""
        self._servers: list[grpc.aio.Server] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self, address: str) -> str:
        """Listen; the real address. Raises OSError when it cannot, TlsFilesError for files that cannot be used."""
        stamps = None
        if self._tls is None:
            port = await self._serve(address)
        else:
            stamps = self._tls.stamps()
            async with _turn(address):
                _expect_free(address)
                port = await self._serve(address)
        if address.startswith("unix:"):
            os.chmod(address.removeprefix("unix:"), 0o600)
            self._address = address
        else:
            self._address = f"{address.rpartition(':')[0]}:{port}"
        if self._tls is not None:
            self._watching = asyncio.create_task(self._watch(self._tls, stamps), name="certificate watch")
        return self._address

    async def stop(self) -> None:
        """Close the port and every stream."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
            self._watching = None
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.stop(0.2) for server in servers))
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _serve(self, address: str) -> int:
        server = self._make(self._tls is not None)
        try:
            if self._tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._tls.for_server())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: in use, or not an address of this machine") from error
        await server.start()
        self._servers.append(server)
        return port

    async def _watch(self, tls: TlsFiles, known: Stamps) -> None:
        told = ""
        while True:
            await asyncio.sleep(WATCH_S)
            now = await asyncio.to_thread(tls.stamps)
            if now == known:
                continue
            try:
                await asyncio.to_thread(tls.check)
                await self._serve(self._address)
            except (TlsFilesError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    _log.error("certificate_not_renewed", why=told)
                continue
            known, told = now, ""
            _log.info("certificate_renewed", cert=str(tls.cert))
            before = self._servers[-2]
            leaving = asyncio.create_task(self._leave(before), name="replaced listener")
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, server: grpc.aio.Server) -> None:
        await server.stop(_STREAMS_S)
        if server in self._servers:
            self._servers.remove(server)


@contextlib.asynccontextmanager
async def _turn(address: str) -> AsyncIterator[None]:
    """While it lasts no other process joins the port: two that found it free at once would share it.

    Raises OSError when others do not get done with it.
    """
    port = int(address.rpartition(":")[2])
    if not port or not sys.platform.startswith("linux"):
        yield
        return
    late = time.monotonic() + _TURN_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        while True:
            try:
                turn.bind(f"\0forebay-port-{port}")  # no file: the name goes with the socket, however its process ends
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > late:
                    raise OSError(
                        f"cannot listen on {address}: others have been opening the port for {_TURN_S:g} s"
                    ) from None
            await asyncio.sleep(0.01)
        yield


def _expect_free(address: str) -> None:
    """Raises OSError where somebody listens already: who may be joined would be joined by anybody."""
    host, _, port = address.rpartition(":")
    if int(port) and host:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(place)
            except OSError as error:
                raise OSError(f"cannot listen on {address}: {error.strerror}") from None
