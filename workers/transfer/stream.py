"""The connector over gRPC: one call per prompt at the worker's own port, host memory at both ends.

Method ``/forebay.Worker/Blocks``: a ``Wanted``, answered by a stream of ``Part``, both MessagePack. HTTP/2 holds the
source back while the reader is busy. The port is the one that the gateway talks to, with the same TLS.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import msgspec

from workers.protocol import Source
from workers.rpc.tls import TlsFiles
from workers.rpc.wire import BLOCKS_METHOD, CLIENT_OPTIONS
from workers.transfer.connector import Part, TransferError, Wanted

_encoder = msgspec.msgpack.Encoder()
_wanted = msgspec.msgpack.Decoder(Wanted)
_part = msgspec.msgpack.Decoder(Part)


class GrpcConnector:
    """The reader's end. A ``Connector``."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        """``tls``: what to show workers on other machines, and whom to take for one."""
        self._tls = tls

    async def pull(self, source: Source, layout: str) -> AsyncGenerator[Part, None]:
        """The parts as they come. Raises TransferError."""
        async with self._channel(source.address) as channel:
            method: Any = channel.unary_stream(BLOCKS_METHOD)
            call = method(_encoder.encode(Wanted(source.ticket, layout)))
            try:
                while (data := await call.read()) is not grpc.aio.EOF:
                    yield _part.decode(data)
            except grpc.aio.AioRpcError as error:
                raise TransferError(
                    _REASONS.get(error.code(), "broken"), error.details() or error.code().name
                ) from None
            except msgspec.DecodeError as error:
                raise TransferError("broken", f"not a part: {error}") from None
            finally:
                call.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._tls is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        credentials, options = self._tls.for_client()
        return grpc.aio.secure_channel(address, credentials, options=[*CLIENT_OPTIONS, *options])


_REASONS = {grpc.StatusCode.NOT_FOUND: "gone", grpc.StatusCode.FAILED_PRECONDITION: "layout"}
_CODES = {reason: code for code, reason in _REASONS.items()}


def handler(parts: Callable[[Wanted], AsyncGenerator[Part, None]]) -> grpc.RpcMethodHandler:
    """The source's end: how the method is served from what ``parts`` gives."""

    async def serve(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncGenerator[bytes, None]:
        try:
            wanted = _wanted.decode(request)
        except msgspec.DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a request for blocks: {error}")
        try:
            async with aclosing(parts(wanted)) as found:
                async for part in found:
                    yield _encoder.encode(part)
        except TransferError as error:
            await context.abort(_CODES.get(error.reason, grpc.StatusCode.ABORTED), str(error))

    made: grpc.RpcMethodHandler = grpc.unary_stream_rpc_method_handler(serve)  # type: ignore[no-untyped-call]
    return made
