"""``bench techniques``: each of the engine's switches on and off in turn, on a load that shows what it is for.

Rules
- Both settings of a technique are measured in alternation, so that a machine that slows down slows both; what is told
  is the ratio of medians with the range of the rounds.
- A technique that refuses here (a device, a model, a file that is not there) has a row that says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.bench import load
from gateway.bench.display import Display
from gateway.bench.engine import BenchEngine, open_engine, overridden
from gateway.bench.load import Load, Request
from gateway.bench.metrics import summarise
from gateway.bench.render import Table
from gateway.bench.report import BenchError, Report
from gateway.bench.target import Target

COLUMNS = ("technique", "load", "tokens/s off", "tokens/s on", "ratio", "of rounds", "weights", "KV per token", "TTFT")


@dataclass(frozen=True, slots=True)
class Technique:
    """``settings`` turn it on. ``copies``: prompts repeat themselves, so that the answer can be looked up in them."""

    name: str
    settings: Sequence[str]
    concurrency: int = 1
    copies: bool = False


TECHNIQUES: Mapping[str, Technique] = {
    one.name: one
    for one in (
        Technique("speculation ngram, copying", ["speculation={method: ngram}"], copies=True),
        Technique("speculation ngram, other", ["speculation={method: ngram}"]),
        Technique("kv_dtype int8", ["kv_dtype=int8"], concurrency=32),
        Technique("kv_dtype fp8", ["kv_dtype=fp8"], concurrency=32),
        Technique("weight_dtype int8, 1 running", ["weight_dtype=int8"]),
        Technique("weight_dtype int8, 32 running", ["weight_dtype=int8"], concurrency=32),
        Technique("weight_dtype int4, 1 running", ["weight_dtype=int4"]),
        Technique("weight_dtype int4, 32 running", ["weight_dtype=int4"], concurrency=32),
        Technique("prefix_cache off", ["prefix_cache=false"], concurrency=32),
        Technique("max_step_tokens 256", ["max_step_tokens=256"], concurrency=32),
    )
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of every request, and how often both settings are run."""

    input_tokens: int = 512
    output_tokens: int = 128
    rounds: int = 3


def pick(names: Sequence[str] | None) -> list[Technique]:
    """Those whose name begins with one of ``names``; all without. Raises BenchError for one that begins none."""
    if not names:
        return list(TECHNIQUES.values())
    for name in names:
        if not any(known.startswith(name) for known in TECHNIQUES):
            raise BenchError(f"--only {name!r} is no technique; there are {', '.join(TECHNIQUES)}")
    return [one for one in TECHNIQUES.values() if one.name.startswith(tuple(names))]


def techniques_report(target: Target, display: Display, techniques: Sequence[Technique], shape: Shape) -> Report:
    """Measure all; one of ``report.runs`` for each. Raises BenchError when the plain model cannot be measured."""
    with display.task("load the model"):
        plain = open_engine(target.source, target.engine, base_dir=target.base_dir)
    parameters = {
        "input": shape.input_tokens,
        "output": shape.output_tokens,
        "engine": target.engine.model_dump(mode="json"),
    }
    report = Report("techniques", plain.versions(), parameters)
    try:
        for technique in techniques:
            report.runs.append(_measured(target, plain, technique, shape, display))
    finally:
        plain.close()
    return report


def _measured(
    target: Target, plain: BenchEngine, technique: Technique, shape: Shape, display: Display
) -> dict[str, Any]:
    found: dict[str, Any] = {"technique": technique.name, "settings": list(technique.settings)}
    try:
        with display.task(f"{technique.name}: load"):
            config = overridden(target.engine, technique.settings)
            engine = open_engine(target.source, config, base_dir=target.base_dir)
    except BenchError as error:
        return {**found, "refused": str(error)}
    try:
        runs: dict[str, list[Mapping[str, Any]]] = {"off": [], "on": []}
        with display.task(technique.name) as tick:
            for turn in range(shape.rounds + 1):
                for label, one in (("off", plain), ("on", engine)):
                    figures = summarise(one.run(_load(technique, shape, one, f"{technique.name}/{turn}/{label}")))
                    if turn:  # the first round warms up
                        runs[label].append(figures)
                tick(turn + 1, shape.rounds + 1)
        return {**found, "concurrency": technique.concurrency, **_compared(runs, plain, engine)}
    finally:
        engine.close()


def _compared(runs: Mapping[str, list[Mapping[str, Any]]], plain: BenchEngine, engine: BenchEngine) -> dict[str, Any]:
    pairs = zip(runs["off"], runs["on"], strict=True)
    ratios = [on["output_tokens_s"] / off["output_tokens_s"] for off, on in pairs]
    middle = {
        label: {name: statistics.median(run[name] for run in several) for name in ("output_tokens_s", "ttft_p50_ms")}
        for label, several in runs.items()
    }
    off, on = plain.loaded, engine.loaded
    return {
        **middle,
        "ratio": round(middle["on"]["output_tokens_s"] / middle["off"]["output_tokens_s"], 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "weights_ratio": round(on.weight_bytes / off.weight_bytes, 3),
        "kv_ratio": round(on.kv_bytes_per_token / off.kv_bytes_per_token, 3),
        "ttft_ratio": round(middle["on"]["ttft_p50_ms"] / middle["off"]["ttft_p50_ms"], 3),
    }


def _load(technique: Technique, shape: Shape, engine: BenchEngine, label: str) -> Load:
    count = max(2, technique.concurrency)
    work = load.uniform(label, count, shape.input_tokens, shape.output_tokens, engine.vocab, technique.concurrency)
    if technique.copies:
        work = Load(tuple(map(_repeating, work.requests)), technique.concurrency)
    engine.check(work)
    return work


def _repeating(request: Request) -> Request:
    """The same length, of one passage again and again: a model goes on with it, and a look-up finds where it does."""
    length = max(1, min(64, len(request.tokens) // 3))
    passage = request.tokens[:length]
    tokens = (passage * (len(request.tokens) // length + 1))[: len(request.tokens)]
    return Request(request.id, tokens, request.max_tokens)


def table(report: Report) -> Table:
    """A row for each technique; weights, KV and TTFT as ratios on ÷ off."""
    made = Table("techniques, on against off", COLUMNS)
    for run in report.runs:
        if "refused" in run:
            made.add(run["technique"], *[None] * (len(COLUMNS) - 1))
            made.notes.append(f"{run['technique']}: {run['refused']}")
            continue
        made.add(
            run["technique"],
            f"{run['concurrency']} running",
            run["off"]["output_tokens_s"],
            run["on"]["output_tokens_s"],
            run["ratio"],
            f"{run['ratio_low']}–{run['ratio_high']}",
            run["weights_ratio"],
            run["kv_ratio"],
            run["ttft_ratio"],
        )
    return made
