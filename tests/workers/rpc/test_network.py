"""gRPC between gateway and worker, as strangers to it would speak it."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from tests.workers.rpc.talk import SECRET, Serve, greeted
from workers.protocol import Purged, encode
from workers.rpc import MAX_FRAME, METHOD, SECRET_KEY

pytestmark = pytest.mark.timeout(60)


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_gateway_d7_two_secrets_in_one_call_are_refused(serve_at: Serve) -> None:
    """gateway D7: one of them right, one wrong: no guessing by list."""
    worker = await serve_at("tcp")
    async with grpc.aio.insecure_channel(worker.server.address) as channel:
        call = channel.stream_stream(METHOD)(metadata=((SECRET_KEY, "wrong"), (SECRET_KEY, SECRET)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "path", ["/forebay.Worker/Other", "/forebay.worker/Session", "/Session", "/grpc.health.v1.Health/Check", "//"]
)
async def test_gateway_d7_there_is_no_other_method(serve_at: Serve, path: str) -> None:
    """gateway D7: every other path, with the secret or not, is not there."""
    worker = await serve_at("tcp")
    async with grpc.aio.insecure_channel(worker.server.address) as channel:
        for metadata in ((), ((SECRET_KEY, SECRET),)):
            call = channel.stream_stream(path)(metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
    assert worker.heard == []


async def test_a_peer_that_sends_too_large_a_frame_loses_its_stream_not_the_worker(serve_at: Serve) -> None:
    worker = await serve_at("tcp")
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(worker.server.address, options=options) as channel:
        call = channel.stream_stream(METHOD)(metadata=((SECRET_KEY, SECRET),))
        await call.read()
        await call.write(bytes(MAX_FRAME + 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end(call)
    assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNKNOWN)
    client = worker.client()
    await greeted(client)
    await client.close()


@pytest.mark.parametrize("data", [b"\xc1", b"", encode(Purged("p", 1)), b"\x81\xa4type\xa4none"])
async def test_a_peer_that_talks_nonsense_loses_its_stream_not_the_worker(serve_at: Serve, data: bytes) -> None:
    worker = await serve_at("tcp")
    async with grpc.aio.insecure_channel(worker.server.address) as channel:
        call = channel.stream_stream(METHOD)(metadata=((SECRET_KEY, SECRET),))
        await call.read()
        await call.write(data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    client = worker.client()
    await greeted(client)
    await client.close()
