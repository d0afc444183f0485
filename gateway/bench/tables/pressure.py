"""Table 5: more under way than the cache holds. Where throughput turns down, and how often work is thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.bench.engine import measure
from gateway.bench.render import Table
from gateway.bench.tables.lab import Lab, Sizes


def run(lab: Lab, sizes: Sizes) -> list[Table]:
    """Closed loops over a pool of ``pool_tokens``."""
    table = Table(
        f"5. A KV pool of {sizes.pool_tokens:,} tokens",
        ("in / out", "under way", "out tok/s", "all tok/s", "TTFT p50 ms", "p95", "ITL p99 ms", "preemptions"),
    )
    runs: list[dict[str, Any]] = []
    for given, wanted, running in sizes.pressure:
        with (
            lab.engine(blocks=lab.blocks(sizes.pool_tokens), max_running=running) as engine,
            lab.display.task(f"{given} / {wanted}, {running} under way") as tick,
        ):
            run = measure(
                engine,
                f"{lab.seed}/t5/{given}/{wanted}/{running}",
                input_tokens=given,
                output_tokens=wanted,
                concurrency=running,
                progress=tick,
            )
        runs.append(run)
        keys = ("output_tokens_s", "total_tokens_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p99_ms", "preemptions")
        table.add(f"{given} / {wanted}", running, *(run[key] for key in keys))
    table.notes = [turning_point(runs)]
    return [table]


def turning_point(runs: Sequence[dict[str, Any]]) -> str:
    """Where more under way gave less, among the runs of the first shape."""
    shape = (runs[0]["input"], runs[0]["output"])
    same = sorted((run for run in runs if (run["input"], run["output"]) == shape), key=lambda run: run["concurrency"])
    best = max(same, key=lambda run: run["output_tokens_s"])
    after = [run for run in same if run["concurrency"] > best["concurrency"]]
    name = f"{shape[0]} / {shape[1]}"
    if not after:
        return f"{name}: throughput still rises at {best['concurrency']} under way."
    loss = 1 - min(run["output_tokens_s"] for run in after) / best["output_tokens_s"]
    return f"{name}: throughput turns down after {best['concurrency']} under way (by {loss:.0%} at most)."
