"""Thousands of calls, and afterwards nothing is left of them: no task, no memory, no descriptor."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest

from gateway.app import public_app
from gateway.cli.listener import Listener, bind
from tests.gateway.harness import MODEL, Site, pool, token, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SETTINGS: dict[str, Any] = {"models": [pool(max_running=16, blocks=512)]}
AT_ONCE = 24
CALLS = 500
ROUNDS = 4
MIB = 2**20


def request(stream: bool = True, max_tokens: int = 6) -> bytes:
    """One call as bytes, on a connection of its own."""
    body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": max_tokens, "stream": stream}
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token('alpha')}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data


async def many(count: int, one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """``one(number)`` for every number, a few at once."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


async def test_thousands_of_streams_leave_no_task_and_no_memory(shared: Site) -> None:
    """gateway E9, in small: 10 % of the callers leave in the middle; then idle."""
    port = int(shared.url.rsplit(":", 1)[1])
    rng = random.Random(9)
    data, long = request(), request(max_tokens=2000)
    finished = left = 0

    async def one(_: int) -> None:
        nonlocal finished, left
        leaves = rng.random() < 0.1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(long if leaves else data)
        if leaves:
            assert await reader.readuntil(b"data: ")
            left += 1
        else:
            assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            finished += 1
        writer.close()

    gc.collect()  # what other tests left is none of this one's
    await shared.at_rest()
    baseline = len(asyncio.all_tasks())
    sizes = []
    for _ in range(ROUNDS):
        await many(CALLS, one)
        await shared.at_rest()
        sizes.append(resident())
    assert finished + left == ROUNDS * CALLS
    assert left > ROUNDS * CALLS * 0.05
    await until(lambda: len(asyncio.all_tasks()) <= baseline, "every task ended")
    # The first round warms up. A leak of 10 KiB a call would be 15 MiB over the others.
    assert sizes[-1] - sizes[0] < 12 * MIB, [size // MIB for size in sizes]


async def test_connections_that_end_by_reset_are_gone(shared: Site) -> None:
    """security 81, in small: each request is ended by RST, before, in or after its headers, or in its answer."""
    bound = bind("127.0.0.1", 0, "listen")
    listener = Listener(public_app(shared.gateway), bound)
    await listener.start()
    loop, address = asyncio.get_running_loop(), bound.getsockname()
    data = request(max_tokens=300).replace(b"connection: close\r\n", b"")

    async def one(number: int) -> None:
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            await loop.sock_connect(client, address)
            if number % 4:
                await loop.sock_sendall(client, data[: (0, 60, len(data), len(data))[number % 4]])
            if number % 4 == 3:
                assert (await loop.sock_recv(client, 20)).startswith(b"HTTP/1.1 200")
        finally:
            client.close()  # sends RST

    gc.collect()
    descriptors: list[int] = []
    try:
        for _ in range(3):
            await many(700, one)
            await until(lambda: not listener.server_state.connections, "every connection is gone")
            await shared.at_rest()
            descriptors.append(len(os.listdir("/proc/self/fd")))
        assert max(descriptors) - min(descriptors) <= 3, descriptors
        await until(lambda: not listener.server_state.tasks, "and every request's task")
    finally:
        await listener.stop(force=True)
