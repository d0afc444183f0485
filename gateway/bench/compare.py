"""``bench compare A B``: two configurations or commands in alternation, and ratios with their spread.

Within a round the order is A B in one and B A in the next, so that what drifts meanwhile (heat, a neighbour) falls on
both alike. A ratio is B ÷ A, made within a round; the median of the rounds is shown with the smallest and the largest.
A difference is told as one only where all rounds agree on its direction.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.bench.display import Display
from gateway.bench.render import Table
from gateway.bench.report import BenchError, Report, checked, machine, read, software

PLACE = "{json}"
FIGURES = (
    ("output_tokens_s", "higher"),
    ("total_tokens_s", "higher"),
    ("ttft_p50_ms", "lower"),
    ("ttft_p95_ms", "lower"),
    ("itl_p50_ms", "lower"),
    ("itl_p99_ms", "lower"),
    ("itl_max_ms", "lower"),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: a command that makes a report."""

    name: str
    command: tuple[str, ...]

    @property
    def writes_file(self) -> bool:
        """Whether it takes the report's path; otherwise the report is its standard output."""
        return any(PLACE in word for word in self.command)


def side(text: str, options: Sequence[str]) -> Side:
    """A configuration (path or shipped name), measured by ``bench engine`` with ``options``; else a command.

    In a command ``{json}`` stands for the file that it writes its report to. Raises BenchError for an empty one.
    """
    from gateway.paths import PathError, resolve_config

    try:
        config = resolve_config(text)
    except PathError:
        words = shlex.split(text)
        if not words:
            raise BenchError("nothing to compare: give a configuration or a command") from None
        return Side(text, tuple(words))
    engine = (sys.executable, "-m", "gateway.cli", "bench", "engine", "--config", str(config))
    return Side(text, (*engine, "--json", PLACE, "--no-floor", *options))


def compare(sides: tuple[Side, Side], rounds: int, display: Display, *, timeout_s: float = 3600.0) -> Report:
    """Run both, ``rounds`` times. Raises BenchError when a command fails or makes no report."""
    report = Report("compare", {**software(), "machine": machine()}, {"rounds": rounds})
    report.parameters = {"rounds": rounds, "a": sides[0].name, "b": sides[1].name}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for turn in range(rounds):
        measured: dict[int, dict[str, Any]] = {}
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            label = "AB"[index]
            with display.task(f"round {turn + 1}/{rounds}: {label} ({sides[index].name})"):
                measured[index] = _run(sides[index], timeout_s)
            report.runs += [{"side": label, "round": turn + 1, **run} for run in measured[index]["runs"]]
        found.append((measured[0], measured[1]))
    report.extra = {"ratios": ratios(found)}
    return report


def ratios(rounds: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """B ÷ A of every figure that both sides have, per load. Raises BenchError when no load is in both."""
    made = []
    loads = _loads(rounds[0][0])
    for load in [load for load in loads if all(load in _loads(b) for _, b in rounds)]:
        for figure, best in FIGURES:
            pairs = [(_loads(a).get(load, {}).get(figure), _loads(b)[load].get(figure)) for a, b in rounds]
            values = [b / a for a, b in pairs if a and b]
            if values:
                made.append({"load": load, "figure": figure, "best": best, **spread(values)})
    if not made:
        raise BenchError(f"the two reports have no load in common (A has {', '.join(loads) or 'none'})")
    return made


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest and largest, and whether all lie on one side of 1."""
    return {
        "ratio": round(statistics.median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
        "rounds": len(values),
        "clear": len(values) > 1 and (min(values) > 1 or max(values) < 1),
    }


def table(report: Report) -> Table:
    """One line per load and figure."""
    made = Table(
        f"B : A   (A = {report.parameters['a']}, B = {report.parameters['b']})",
        ("load", "figure", "B : A", "low", "high", "verdict"),
    )
    for item in report.extra["ratios"]:
        better = (item["ratio"] > 1) == (item["best"] == "higher")
        verdict = ("B is better" if better else "A is better") if item["clear"] else "no clear difference"
        made.add(item["load"], item["figure"], item["ratio"], item["low"], item["high"], verdict)
    made.notes = [f"{report.parameters['rounds']} rounds; a verdict needs two or more that all agree."]
    return made


def _loads(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Runs by what was asked of them."""
    return {str(run.get("name") or f"{run.get('concurrency')} running"): run for run in report["runs"]}


def _run(one: Side, timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as scratch:
        path = Path(scratch) / "report.json"
        command = [word.replace(PLACE, str(path)) for word in one.command]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: S603
        except OSError as error:
            raise BenchError(f"{one.name!r} is neither a configuration nor a command: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise BenchError(f"{one.name!r} did not end within {timeout_s:g} s") from None
        if done.returncode != 0:
            raise BenchError(f"{one.name!r} ended with {done.returncode}:\n{_tail(done.stderr.splitlines())}")
        if one.writes_file:
            return read(path)
        try:
            return checked(json.loads(done.stdout), repr(one.name))
        except ValueError:
            raise BenchError(f"{one.name!r} wrote no JSON to its standard output; use --json - or {PLACE}") from None


def _tail(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line[:200]}" for line in list(lines)[-12:])
