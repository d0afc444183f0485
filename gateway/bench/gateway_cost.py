"""``bench gateway``: what the gateway itself costs, with everything on, in front of a worker that answers at once.

Rules
- The client runs here, gateway, stub and collector in processes of their own (``stage.py``). On two cores they share:
  requests per second are what is left for the gateway beside its client and its worker.
- Added time is the time through the gateway, from when a request's bytes go out to when the last of its answer's are
  there, minus the median time of the same request straight to the stub at the same rate. What the client takes before
  and after is not the gateway's; its lateness is told beside it.
- A run that had errors says so; its figures are of what succeeded.
- Machines differ, and one differs from hour to hour: a bare echo (``echo_server.py``) is measured by the same client in
  the same run, and the gateway's processor time per request is told, which others on the machine change less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.bench import metrics
from gateway.bench.display import Display
from gateway.bench.http_client import HttpClient, HttpError
from gateway.bench.load import Timeline
from gateway.bench.online import run_loop
from gateway.bench.render import Table
from gateway.bench.report import Report, machine, software
from gateway.bench.serve import Attack, Server, figures
from gateway.bench.stage import INPUT, MODEL, RATE, TENANTS, Stage, echoing, staged
from gateway.bench.traffic import Prompts, Shot, Tenant, synthetic

LARGE_BYTES = 200_000
PROBE_S = 0.02
_VOCAB = 40_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    seconds: float = 10.0
    """Of each run with a rate, and of the probes."""
    requests: int = 6000
    """Of each closed loop."""
    concurrency: int = 64
    streams: int = 32
    stream_tokens: int = 1024
    open_streams: int = 2000


QUICK = Sizes(seconds=2.0, requests=300, concurrency=16, streams=8, stream_tokens=64, open_streams=50)


def gateway_report(source: str, sizes: Sizes, display: Display) -> Report:
    """All runs. Raises BenchError."""
    report = Report("gateway", {**software(), "machine": machine()}, {"rate": RATE, "source": source})
    with echoing() as url:
        report.runs += run_loop(_bare(url, sizes, display))
    for ratio in (1.0, 0.1):
        with staged(source, sample_ratio=ratio) as stage:
            report.runs += run_loop(_fast(stage, sizes, ratio, display))
    with staged(source, sample_ratio=0.1, step_s=0.5) as stage:
        report.runs.append(run_loop(_open_streams(stage, sizes, display)))
    with staged(source, sample_ratio=0.1) as stage:
        report.runs += run_loop(_large(stage, sizes, display))
    return report


async def _fast(stage: Stage, sizes: Sizes, ratio: float, display: Display) -> list[dict[str, Any]]:
    server, callers, client = _server(stage), _callers(stage), HttpClient(stage.url)
    attack = Attack(server, callers, client)
    name = f"sampling {ratio:g}"
    runs = []
    try:
        await attack.closed_loop(_shots("warm", 200, callers, 1), 8, _silent)
        with display.task(f"{name}: {RATE:g} requests/s") as tick:
            shots = _shots(f"{name}/rate", round(RATE * sizes.seconds), callers, 1, RATE)
            lines = await attack.open_loop(shots, tick)
        runs.append({"name": f"{RATE:g} requests/s, {name}", **figures(lines, attack, None), **_added(lines, stage)})
        for load in _loads(stage.url, sizes):
            with display.task(f"{name}: {load.name}") as tick:
                before, shots = stage.cpu_s(), _shots(f"{name}/{load.name}", load.requests, callers, load.tokens)
                lines = await Attack(load.server, callers, client).closed_loop(shots, load.under_way, tick)
            made = metrics.summarise(lines)
            after, done = stage.cpu_s(), made["requests"] - made["failed"]
            if before is not None and after is not None and done:
                made["gateway_cpu_us"] = round((after - before) / done * 1e6)
            runs.append({"name": f"{load.name}, {name}", **made})
    finally:
        client.close()
    return runs


def _added(lines: Sequence[Timeline], stage: Stage) -> dict[str, Any]:
    took = [
        line.finished - line.sent
        for line in lines
        if line.error is None and line.finished is not None and line.sent is not None
    ]
    made: dict[str, Any] = {"direct_p50_ms": stage.direct_ms}
    for q in (0.5, 0.99):
        whole = metrics.percentile(took, q)
        made[f"added_p{round(q * 100)}_ms"] = None if whole is None else round(whole * 1e3 - stage.direct_ms, 3)
    return made


@dataclass(frozen=True, slots=True)
class _Load:
    """A closed loop."""

    name: str
    server: Server
    requests: int
    under_way: int
    tokens: int


def _loads(url: str, sizes: Sizes) -> list[_Load]:
    """What is asked of the gateway and of the bare echo alike."""
    whole, streamed = Server(url, MODEL, streamed=False), Server(url, MODEL)
    at_once, streams = sizes.concurrency, sizes.streams
    return [
        _Load(f"{at_once} under way", whole, sizes.requests, at_once, 1),
        _Load(f"{at_once} under way, streamed", streamed, sizes.requests, at_once, 1),
        _Load(f"{streams} streams", streamed, streams, streams, sizes.stream_tokens),
    ]


async def _bare(url: str, sizes: Sizes, display: Display) -> list[dict[str, Any]]:
    """The echo."""
    callers, client, runs = [Tenant(name, "none") for name in TENANTS], HttpClient(url), []
    try:
        attack = Attack(Server(url, MODEL), callers, client)
        with display.task(f"bare echo: {RATE:g} requests/s") as tick:
            lines = await attack.open_loop(_shots("echo/rate", round(RATE * sizes.seconds), callers, 1, RATE), tick)
        runs.append({"name": f"{RATE:g} requests/s, bare echo", **figures(lines, attack, None)})
        for load in _loads(url, sizes):
            with display.task(f"bare echo: {load.name}") as tick:
                shots = _shots(f"echo/{load.name}", load.requests, callers, load.tokens)
                lines = await Attack(load.server, callers, client).closed_loop(shots, load.under_way, tick)
            runs.append({"name": f"{load.name}, bare echo", **metrics.summarise(lines)})
    finally:
        client.close()
    return runs


async def _open_streams(stage: Stage, sizes: Sizes, display: Display) -> dict[str, Any]:
    """Many streams stay open; ``/healthz`` is asked meanwhile."""
    callers, client, probe = _callers(stage), HttpClient(stage.url), HttpClient(stage.url)
    tokens = round(4 * sizes.seconds) + 30  # the stub makes two a second: longer than the probes take
    shots = _shots("open", sizes.open_streams, callers, tokens)
    attack = Attack(_server(stage), callers, client)
    try:
        with display.task(f"{sizes.open_streams} open streams"):
            running = asyncio.create_task(attack.closed_loop(shots, sizes.open_streams, _silent))
            await asyncio.sleep(max(5.0, sizes.open_streams / 400))
            took = await _probe(probe, sizes.seconds)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return {"name": f"{sizes.open_streams} open streams: /healthz", **_times("healthz", took)}
    finally:
        client.close()
        probe.close()


async def _large(stage: Stage, sizes: Sizes, display: Display) -> list[dict[str, Any]]:
    """Small requests alone, and beside prompts of 200 KB, one and many at a time."""
    server, callers, client = _server(stage), _callers(stage), HttpClient(stage.url)
    text = Prompts(_VOCAB, as_text=True).make("large", LARGE_BYTES // 5)
    assert isinstance(text, str)
    large = Shot(0, text[:LARGE_BYTES], 0, 1)
    runs = []
    try:
        await Attack(server, callers, client).closed_loop(_shots("warm", 50, callers, 1), 8, _silent)
        for beside in (0, 1, 50):
            others = HttpClient(stage.url)
            crowd = [Attack(server, [callers[index % len(callers)]], others) for index in range(beside)]
            lines: list[Timeline] = []
            background = [asyncio.create_task(_again(attack, large, lines)) for attack in crowd]
            with display.task(f"small requests beside {beside} of 200 KB") as tick:
                shots = _shots(f"small/{beside}", round(20 * sizes.seconds), callers, 1, 20.0)
                small = await Attack(server, callers, client).open_loop(shots, tick)
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            others.close()
            run = {"name": f"small requests beside {beside} of 200 KB", **metrics.summarise(small)}
            runs.append({**run, "large": metrics.summarise(lines)} if beside else run)
    finally:
        client.close()
    return runs


async def _again(attack: Attack, shot: Shot, lines: list[Timeline]) -> None:
    while True:
        lines += await attack.closed_loop([shot], 1, _silent)


async def _probe(client: HttpClient, seconds: float) -> list[float]:
    """Seconds that ``/healthz`` took, asked every ``PROBE_S``; one that failed counts as infinite."""
    took, end = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        try:
            await client.get("/healthz", headers={})
            took.append(time.perf_counter() - began)
        except HttpError:
            took.append(float("inf"))
        await asyncio.sleep(PROBE_S)
    return took


def _times(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    made: dict[str, Any] = {"requests": len(seconds)}
    for q in (0.5, 0.99):
        value = metrics.percentile(seconds, q)
        made[f"{name}_p{round(q * 100)}_ms"] = None if value is None else round(value * 1e3, 3)
    return made


def _server(stage: Stage) -> Server:
    return Server(stage.url, MODEL)


def _callers(stage: Stage) -> list[Tenant]:
    return [Tenant(name, stage.tokens[name]) for name in TENANTS]


def _shots(label: str, count: int, callers: Sequence[Tenant], output: int, rate: float | None = None) -> list[Shot]:
    from gateway.simulate.lengths import Fixed

    given, wanted = Fixed(kind="fixed", value=INPUT), Fixed(kind="fixed", value=output)
    return synthetic(f"gateway/{label}", count, callers, Prompts(_VOCAB), given, wanted, rate)


def _silent(done: int, total: int) -> None:
    """Progress that nobody is shown."""


def gateway_table(runs: Sequence[dict[str, Any]]) -> Table:
    """The runs, a row each."""
    columns = (
        "run",
        "requests",
        "failed",
        "requests/s",
        "tokens/s",
        "p50 ms",
        "p99 ms",
        "added p50",
        "added p99",
        "CPU µs",
    )
    table = Table("gateway: JWT, quotas, fair queue and traces on, a stub worker behind it", columns)
    for run in runs:
        p50, p99 = run.get("healthz_p50_ms", run.get("e2e_p50_ms")), run.get("healthz_p99_ms", run.get("e2e_p99_ms"))
        rates = run.get("requests_s"), run.get("output_tokens_s")
        added = run.get("added_p50_ms"), run.get("added_p99_ms")
        cpu = run.get("gateway_cpu_us")
        table.add(run["name"], run["requests"], run.get("failed", 0), *rates, p50, p99, *added, cpu)
    return table
