"""Bodies that are sent but for their end: bounded per tenant, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from tests.gateway.conftest import Start
from tests.gateway.harness import Site, token, until


@contextlib.asynccontextmanager
async def sending(site: Site, tenant: str, size: int, whole: int = 9000) -> AsyncIterator[asyncio.StreamReader]:
    """A request that says ``whole`` bytes and sends ``size`` of them; open until the block ends."""
    url = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token(tenant)}\r\n"
        f"content-type: application/json\r\ncontent-length: {whole}\r\n\r\n"
    )
    writer.write(head.encode() + b" " * size)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_tenant_may_have_so_much_on_its_way_and_no_more(start: Start) -> None:
    """One caller with a key could fill the gateway's memory: a body is read before any quota can count it."""
    async with start() as site:
        arriving = site.gateway.parts.pipeline.arriving
        arriving.most = 10_000
        async with sending(site, "alpha", 6000):
            await until(lambda: len(arriving) == 6000, "the first body's bytes are here")
            async with sending(site, "alpha", 6000) as second, asyncio.timeout(30):
                answer = await second.readuntil(b"}}")
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"bodies_on_their_way" in answer
                assert b"retry-after: 1" in answer
            await until(lambda: len(arriving) == 6000, "what the second one held is given back")
            async with sending(site, "beta", 6000):
                await until(lambda: len(arriving) == 12_000, "another tenant has room of its own")
            assert (await site.complete("alpha")).status_code == 200, "what comes whole needs no room"
        await until(lambda: len(arriving) == 0, "nothing is left of callers that went away")
        await site.at_rest()


async def test_four_of_the_largest_bodies_always_have_room(start: Start) -> None:
    async with start({"listen": {"port": 0, "max_body_bytes": 64 * 2**20}}, ready=False) as site:
        assert site.gateway.parts.pipeline.arriving.most == 256 * 2**20
    async with start(ready=False) as site:
        assert site.gateway.parts.pipeline.arriving.most == 64 * 2**20
