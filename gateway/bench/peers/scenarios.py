"""The loads that every engine runs, and the figures that count in each.

A scenario is one engine start with certain settings and one or more loads. Its prompts carry a label that names round
and engine, so that nobody ever sees a prompt twice except where the load is about that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gateway.bench import gap, load, metrics
from gateway.bench.engine import waves
from gateway.bench.load import Load, Timeline
from gateway.bench.peers.wire import Settings
from gateway.bench.report import BenchError

Figures = dict[str, Any]
Run = Callable[[Load], list[Timeline]]
"""Runs a load on the engine under test."""
Best = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the loads are. The defaults are those of the published table; tests take small ones."""

    input: int = 512
    output: int = 128
    concurrency: tuple[int, ...] = (1, 8, 32, 64)
    prefix: int = 1500
    prefix_own: int = 32
    prefix_repeats: int = 3
    long_prompt: int = 2000
    long_prompts: int = 3
    chunks: tuple[int, ...] = (2048, 1024, 512, 256)
    stream: tuple[int, int] = (32, 160)
    stream_at: int = 24
    burst: int = 200
    burst_input: tuple[int, int] = (8, 32)
    burst_output: tuple[int, int] = (16, 96)
    burst_running: tuple[int, ...] = (16, 256)
    answer: int = 16
    """Tokens of the answers that show whether all compute the same model."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a scenario knows besides its engine."""

    vocab: int
    label: str
    """Names round and engine."""
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Scenario:
    """One engine start."""

    name: str
    title: str
    settings: Settings
    measure: Callable[[Run, Context], Figures]
    headlines: dict[str, tuple[str, Best]] = field(default_factory=dict)
    """Figure → (what it is, which direction is better); ratios are made of these."""


def scenarios(sizes: Sizes, base: Settings) -> list[Scenario]:
    """All of them; ``base`` has dtype and threads."""
    return [_throughput(sizes, base), *(_gap(sizes, base, chunk) for chunk in sizes.chunks), *_bursts(sizes, base)]


def pick(found: Sequence[Scenario], names: Sequence[str]) -> list[Scenario]:
    """Those named (all when none is), a name standing for all that begin with it. Raises BenchError."""
    unknown = [name for name in names if not any(scenario.name.startswith(name) for scenario in found)]
    if unknown:
        raise BenchError(f"--only {unknown[0]!r} is none of {', '.join(scenario.name for scenario in found)}")
    return [item for item in found if not names or any(item.name.startswith(name) for name in names)]


def _settings(base: Settings, longest: int, running: int, each: int, **changes: Any) -> Settings:
    """Room for ``running`` requests of ``each`` tokens and an eighth more, and a context that fits the longest one."""
    context = -(-(longest + 16) // 64) * 64
    tokens = max(running * each, 2 * context)
    values = {**base.to_json(), "max_context": context, "kv_tokens": -(-tokens * 9 // 8 // 256) * 256}
    return Settings(**{**values, "max_running": running, **changes})


def _throughput(sizes: Sizes, base: Settings) -> Scenario:
    """Equal requests at several numbers under way; a shared prefix, missed and hit; and answers to compare."""

    def measure(run: Run, context: Context) -> Figures:
        run(load.uniform(f"{context.label}/warm", 4, 32, 4, context.vocab, 2))
        same = load.uniform("same-for-all", 4, 24, sizes.answer, context.vocab, 1)
        answers = run(Load(same.requests, same.concurrency, keep_answers=True))
        figures: Figures = {"answers": [line.answer for line in answers], "runs": []}
        for count in sizes.concurrency:
            work = load.uniform(
                f"{context.label}/{count}", waves(count), sizes.input, sizes.output, context.vocab, count
            )
            found = metrics.summarise(run(work))
            figures["runs"].append({"concurrency": count, **found})
            figures[f"output_tokens_s_{count}"] = found["output_tokens_s"]
            figures[f"ttft_p50_ms_{count}"] = found["ttft_p50_ms"]
            figures[f"itl_p50_ms_{count}"] = found["itl_p50_ms"]
        pairs = [
            run(load.common_prefix(f"{context.label}/p{i}", 2, sizes.prefix, sizes.prefix_own, 4, context.vocab))
            for i in range(sizes.prefix_repeats)
        ]
        figures["prefix_miss_ttft_ms"] = _median_ttft(pair[0] for pair in pairs)
        figures["prefix_hit_ttft_ms"] = _median_ttft(pair[1] for pair in pairs)
        return figures

    headlines: dict[str, tuple[str, Best]] = {}
    for count in sizes.concurrency:
        headlines[f"output_tokens_s_{count}"] = (f"output tok/s, {count} running", "higher")
    for count in sizes.concurrency:
        headlines[f"ttft_p50_ms_{count}"] = (f"TTFT p50 ms, {count} running", "lower")
    for count in sizes.concurrency:
        headlines[f"itl_p50_ms_{count}"] = (f"ITL p50 ms, {count} running", "lower")
    shape = f"{sizes.prefix} + {sizes.prefix_own} tokens"
    headlines["prefix_miss_ttft_ms"] = (f"TTFT ms of {shape}, miss", "lower")
    headlines["prefix_hit_ttft_ms"] = (f"TTFT ms of {shape}, hit", "lower")
    longest = max(sizes.input + sizes.output, sizes.prefix + sizes.prefix_own + 4)
    settings = _settings(base, longest, max(sizes.concurrency), sizes.input + sizes.output)
    return Scenario("throughput", f"{sizes.input} in / {sizes.output} out", settings, measure, headlines)


def _gap(sizes: Sizes, base: Settings, chunk: int) -> Scenario:
    """One stream decodes, long prompts arrive."""

    def measure(run: Run, context: Context) -> Figures:
        run(load.uniform(f"{context.label}/warm", 2, 32, 4, context.vocab, 2))
        found, lines = gap.measure(
            run,
            context.label,
            context.vocab,
            chunk,
            stream=sizes.stream,
            prompts=sizes.long_prompts,
            length=sizes.long_prompt,
            at_token=sizes.stream_at,
        )
        return {
            **asdict(found),
            "gap_of_limit": round(found.of_limit, 4),
            "ttft_of_the_prompts_ms": _median_ttft(lines[1:]),
            "total_tokens_s": metrics.summarise(lines)["total_tokens_s"],
        }

    longest = max(sizes.long_prompt + 8, sum(sizes.stream))
    settings = _settings(base, longest, sizes.long_prompts + 1, longest + 64, max_step_tokens=chunk)
    headlines: dict[str, tuple[str, Best]] = {
        "largest_gap_ms": (f"largest gap ms, chunk {chunk}", "lower"),
        "gap_of_limit": (f"that gap : its longest chunk + step, chunk {chunk}", "lower"),
        "total_tokens_s": (f"all tok/s meanwhile, chunk {chunk}", "higher"),
    }
    title = f"a stream while {sizes.long_prompts} prompts of {sizes.long_prompt} arrive, chunk {chunk}"
    return Scenario(f"gap-{chunk}", title, settings, measure, headlines)


def _bursts(sizes: Sizes, base: Settings) -> list[Scenario]:
    def measure(run: Run, context: Context) -> Figures:
        run(load.uniform(f"{context.label}/warm", 4, 16, 4, context.vocab, None))
        # The same lengths for everybody, in every round: only the tokens differ.
        shapes = [
            (len(request.tokens), request.max_tokens)
            for request in load.burst("burst", sizes.burst, sizes.burst_input, sizes.burst_output, 1000).requests
        ]
        found = metrics.summarise(run(load.shaped(context.label, shapes, context.vocab)))
        keys = ("duration_s", "output_tokens_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "failed")
        return {key: found[key] for key in keys}

    made = []
    longest = sizes.burst_input[1] + sizes.burst_output[1]
    for running in sizes.burst_running:
        settings = _settings(base, longest, running, longest)
        headlines: dict[str, tuple[str, Best]] = {
            "duration_s": (f"burst of {sizes.burst}, {running} running: total s", "lower"),
            "ttft_p95_ms": (f"burst of {sizes.burst}, {running} running: TTFT p95 ms", "lower"),
        }
        title = f"burst of {sizes.burst}, at most {running} running"
        made.append(Scenario(f"burst-{running}", title, settings, measure, headlines))
    return made


def _median_ttft(lines: Any) -> float | None:
    values = [value for line in lines if (value := metrics.ttft(line)) is not None]
    return _ms(statistics.median(values)) if values else None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
