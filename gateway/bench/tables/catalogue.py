"""Which tables there are, and running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gateway.bench.display import Display
from gateway.bench.render import Table
from gateway.bench.report import BenchError, Report, machine, model_versions, software
from gateway.bench.tables import batching, chunking, kv_cache, kv_memory, prefix, pressure
from gateway.bench.tables.lab import Lab, Sizes
from gateway.bench.target import Target

TABLES: dict[int, Callable[[Lab, Sizes], list[Table]]] = {
    1: kv_cache.run,
    2: batching.run,
    3: chunking.run,
    4: prefix.run,
    5: pressure.run,
    6: kv_memory.run,
}


def numbers(text: str) -> list[int]:
    """``1,3`` → [1, 3]; empty: all. Raises BenchError."""
    if not text:
        return list(TABLES)
    parts = text.split(",")
    wrong = [part for part in parts if not part.strip().isdigit() or int(part) not in TABLES]
    if wrong:
        raise BenchError(f"--only {wrong[0]!r} is not one of {', '.join(map(str, TABLES))}")
    return sorted({int(part) for part in parts})


def tables_report(
    target: Target, display: Display, chosen: Sequence[int], sizes: Sizes, seed: int = 0
) -> tuple[Report, list[Table]]:
    """Make the tables one after the other. Raises BenchError."""
    lab = Lab(target, display, seed)
    parameters: dict[str, Any] = {"tables": list(chosen), "engine": target.engine.model_dump(), "seed": seed}
    versions: dict[str, Any] = {**software(), **model_versions(target.source, target.files()), "machine": machine()}
    report = Report("tables", versions, parameters)
    made: list[Table] = []
    for number in chosen:
        tables = TABLES[number](lab, sizes)
        made += tables
        report.runs += [{"table": number, **table.to_json()} for table in tables]
    versions |= {"engines": sorted(lab.engines)}
    return report, made
