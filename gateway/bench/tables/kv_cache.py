"""Table 1: one answer with and without keeping keys and values. In fp32, so that the tokens must be the same."""

from __future__ import annotations

import statistics

from gateway.bench import load
from gateway.bench.render import Table
from gateway.bench.tables.lab import Lab, Sizes


def run(lab: Lab, sizes: Sizes) -> list[Table]:
    """The same prompt both ways: tokens, seconds, rows through the linears."""
    given, wanted = sizes.answer
    table = Table(
        f"1. One {wanted}-token answer to a {given}-token prompt",
        ("keys and values", "seconds", "rows projected", "time ratio", "same tokens"),
    )
    found: list[tuple[float, int, list[int]]] = []
    for kept in (True, False):
        with lab.engine(kv_cache_reuse=kept, dtype="float32", max_running=1, prefix_cache=False) as engine:
            lab.run(engine, "warm up", load.uniform(f"{lab.seed}/t1/warm", 1, given, 4, engine.vocab, 1))
            times = []
            for _ in range(sizes.repeats):
                work = load.uniform(f"{lab.seed}/t1", 1, given, wanted, engine.vocab, 1)
                [line] = lab.run(
                    engine, f"keys and values {'kept' if kept else 'not kept'}", load.Load(work.requests, 1, True)
                )
                times.append(line.end or 0.0)
            found.append((statistics.median(times), engine.steps.rows, line.answer))
    (with_s, with_rows, answer), (without_s, without_rows, other) = found
    table.add("kept", with_s, with_rows, 1.0, True)
    table.add("not kept", without_s, without_rows, without_s / with_s, answer == other)
    table.notes = ["fp32, one sequence; times are medians."] if sizes.repeats > 1 else ["fp32, one sequence."]
    return [table]
