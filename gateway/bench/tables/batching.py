"""Table 2: many short requests at once, from one at a time to continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.bench import load, metrics
from gateway.bench.load import Timeline
from gateway.bench.render import Table
from gateway.bench.tables.lab import Lab, Sizes

Shape = tuple[int, int]
"""Input and output tokens."""


def run(lab: Lab, sizes: Sizes) -> list[Table]:
    """The same requests, all there at the start, under five ways of batching."""
    table = Table(
        f"2. {sizes.requests:,} requests at once (prompts {sizes.inputs[0]}–{sizes.inputs[1]}, "
        f"answers {sizes.outputs[0]}–{sizes.outputs[1]})",
        ("batching", "TTFT p50 ms", "TTFT p95 ms", "total s", "out tok/s", "to the last"),
    )
    drawn = load.burst(f"{lab.seed}/t2", sizes.requests, sizes.inputs, sizes.outputs, 1000)
    shapes = [(len(request.tokens), request.max_tokens) for request in drawn.requests]
    ways: list[tuple[str, dict[str, object], list[Shape]]] = [
        ("one at a time, no cache", {"max_running": 1, "kv_cache_reuse": False}, shapes),
        ("one at a time, cache", {"max_running": 1}, shapes),
        (f"static {sizes.slots}, padded", {"max_running": sizes.slots, "mode": "static"}, padded(shapes, sizes.slots)),
        (f"static {sizes.slots}", {"max_running": sizes.slots, "mode": "static"}, shapes),
        (f"continuous {sizes.slots}", {"max_running": sizes.slots}, shapes),
    ]
    rates: list[float] = []
    for name, changes, computed in ways:
        with lab.engine(**changes, prefix_cache=False) as engine:
            warm = load.uniform(f"{lab.seed}/t2/warm", sizes.slots, 16, 4, engine.vocab, None)
            lab.run(engine, "warm up", warm)
            lines = lab.run(engine, name, load.shaped(f"{lab.seed}/t2/{name}", computed, engine.vocab))
        figures = metrics.summarise(trimmed(lines, shapes))
        rates.append(figures["output_tokens_s"])
        table.add(name, figures["ttft_p50_ms"], figures["ttft_p95_ms"], figures["duration_s"], rates[-1], None)
    for row, rate in zip(table.rows, rates, strict=True):
        row[-1] = rate / rates[-1]
    table.notes = [
        "Padded: prompts and answers of a batch computed to its longest; only tokens that were asked for count.",
        "Static: a batch runs to its end before the next begins; places of answers that ended stay empty.",
    ]
    return [table]


def padded(shapes: Sequence[Shape], size: int) -> list[Shape]:
    """Every batch of ``size`` requests at the length of its longest."""
    made: list[Shape] = []
    for start in range(0, len(shapes), size):
        batch = shapes[start : start + size]
        made += [(max(given for given, _ in batch), max(wanted for _, wanted in batch))] * len(batch)
    return made


def trimmed(lines: Sequence[Timeline], shapes: Sequence[Shape]) -> list[Timeline]:
    """Timelines with only the tokens that were asked for; their ends stay."""
    return [
        replace(line, input_tokens=given, times=line.times[:wanted])
        for line, (given, wanted) in zip(lines, shapes, strict=True)
    ]
