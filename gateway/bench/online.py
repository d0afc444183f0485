"""The runs of ``bench serve``: warm-up, then one run per concurrency, per rate, or the replay of a log."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.bench.display import Display
from gateway.bench.engine import waves
from gateway.bench.http_client import HttpClient
from gateway.bench.metrics import Slo
from gateway.bench.report import BenchError, Report, machine, software
from gateway.bench.serve import Attack, Endpoint, Server, ServerMetrics, figures, model_name
from gateway.bench.traffic import Prompts, Shot, Tenant, replayed, synthetic

if TYPE_CHECKING:
    from gateway.simulate.lengths import Fixed, Lognormal, Uniform

T = TypeVar("T")
ENDPOINTS: dict[str, Endpoint] = {"completions": "completions", "chat": "chat"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``bench serve`` was asked to do."""

    callers: Sequence[Tenant]
    prompts: Prompts
    inputs: Fixed | Uniform | Lognormal
    outputs: Fixed | Uniform | Lognormal
    concurrency: Sequence[int] = ()
    rates: Sequence[float] = ()
    """Requests per second."""
    replay: Path | None = None
    speed: float = 1.0
    requests: int | None = None
    duration_s: float | None = None
    """Of an open loop, instead of a number of requests."""
    warm_up: int = 4
    seed: int = 0
    slo: Slo | None = None
    metrics_urls: Sequence[str] = ()

    def count(self, *, concurrency: int | None = None, rate: float | None = None) -> int:
        """Requests of a run."""
        if self.requests is not None:
            return self.requests
        if concurrency is not None:
            return waves(concurrency)
        return max(1, round((rate or 1.0) * (self.duration_s or 60.0)))


def endpoint(text: str) -> Endpoint:
    """Raises BenchError for anything but the two there are."""
    if (found := ENDPOINTS.get(text)) is None:
        raise BenchError(f"--endpoint {text!r} is not one of {', '.join(ENDPOINTS)}")
    return found


def prompts(text: str, at: Endpoint, vocab: int) -> Prompts:
    """Token ids or words; a chat takes words only. Raises BenchError."""
    if text not in ("ids", "text"):
        raise BenchError(f"--prompts {text!r} is not one of ids, text")
    return Prompts(vocab, as_text=text == "text" or at == "chat")


def serve_report(server: Server, plan: Plan, display: Display) -> Report:
    """Warm up, run, measure. Raises BenchError."""
    return run_loop(measure(server, plan, display))


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run it in uvloop where that is installed, else in asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def measure(server: Server, plan: Plan, display: Display) -> Report:
    """``serve_report`` for callers that have a loop."""
    try:
        client = HttpClient(server.base)
    except ValueError as error:
        raise BenchError(f"--url: {error}") from None
    try:
        if not server.model:
            name = await model_name(client, plan.callers[0].key)
            server = Server(server.url, name, server.endpoint, server.ignore_eos, server.timeout_s)
        versions = {**software(), "server": server.base, "model": server.model, "machine": machine()}
        report = Report("serve", versions, _parameters(server, plan))
        counted = ServerMetrics(plan.metrics_urls)
        await _warm_up(server, plan, client, display)
        for run in _runs(plan):
            attack = Attack(server, plan.callers, client)
            await counted.begin()
            with display.task(run.title) as tick:
                if run.concurrency is not None:
                    lines = await attack.closed_loop(run.shots, run.concurrency, tick)
                else:
                    lines = await attack.open_loop(run.shots, tick)
            report.runs.append(
                {**run.figures, **figures(lines, attack, plan.slo), **await counted.figures()},
            )
        return report
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class _Run:
    title: str
    shots: list[Shot]
    figures: dict[str, Any]
    concurrency: int | None = None


def _runs(plan: Plan) -> list[_Run]:
    label = f"serve/{plan.seed}"
    made = []
    for count in plan.concurrency:
        shots = _synthetic(plan, f"{label}/c{count}", plan.count(concurrency=count), None)
        made.append(_Run(f"{count} under way", shots, {"mode": "closed", "concurrency": count}, count))
    for rate in plan.rates:
        shots = _synthetic(plan, f"{label}/r{rate:g}", plan.count(rate=rate), rate)
        made.append(_Run(f"{rate:g} requests/s", shots, {"mode": "open", "rate": rate, "name": f"{rate:g}/s"}))
    if plan.replay is not None:
        shots = replayed(plan.replay, f"{label}/replay", plan.callers, plan.prompts, plan.speed)
        title = f"replay of {plan.replay.name}"
        made.append(_Run(title, shots, {"mode": "replay", "name": plan.replay.name, "speed": plan.speed}))
    return made


def _synthetic(plan: Plan, label: str, count: int, rate: float | None) -> list[Shot]:
    return synthetic(label, count, plan.callers, plan.prompts, plan.inputs, plan.outputs, rate)


async def _warm_up(server: Server, plan: Plan, client: HttpClient, display: Display) -> None:
    """A few requests of every tenant. Raises BenchError when none of them succeeds: the runs would be empty."""
    if not plan.warm_up:
        return
    shots = _synthetic(plan, f"serve/{plan.seed}/warm", plan.warm_up * len(plan.callers), None)
    attack = Attack(server, plan.callers, client)
    with display.task("warm up") as tick:
        lines = await attack.closed_loop(shots, len(plan.callers), tick)
    errors = sorted({line.error for line in lines if line.error is not None})
    if errors and all(line.error is not None for line in lines):
        raise BenchError(f"{server.base}: every request of the warm-up failed: {', '.join(errors)}")


def _parameters(server: Server, plan: Plan) -> dict[str, Any]:
    return {
        "endpoint": server.endpoint,
        "ignore_eos": server.ignore_eos,
        "input": plan.inputs.model_dump(),
        "output": plan.outputs.model_dump(),
        "tenants": {caller.name: caller.share for caller in plan.callers},
        "seed": plan.seed,
        "warm_up": plan.warm_up,
    }
