"""``bench peers``: every engine runs every scenario in turn, several rounds; ratios of ours to each, with their spread.

The order of the engines rotates from round to round, so that a machine that warms up or slows down favours nobody. A
ratio is always ours ÷ theirs turned so that above 1 we are better; it is made within a round and the median over the
rounds is shown with the smallest and the largest.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gateway.bench.compare import spread
from gateway.bench.display import Display
from gateway.bench.peers.gguf_export import export
from gateway.bench.peers.host import driving
from gateway.bench.peers.known import OURS, OVERRIDES, Installed, ours
from gateway.bench.peers.scenarios import Best, Context, Scenario, Sizes
from gateway.bench.render import Cell, Table
from gateway.bench.report import BenchError, Report, machine, software
from gateway.bench.target import Target
from workers.model_store import ModelFiles

Figures = dict[str, Any]


@dataclass(slots=True)
class Contest:
    """Engines, scenarios, and what has been measured so far."""

    engines: Sequence[Installed]
    """Ours first."""
    model: ModelFiles
    vocab: int
    sizes: Sizes
    cache: Path
    """Where exported weights are kept."""
    found: list[dict[str, Any]] = field(default_factory=list)
    """One entry per engine, scenario and round."""
    failures: list[str] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def go(self, scenarios: Sequence[Scenario], rounds: int, display: Display) -> None:
        """Run everything. A peer that fails is told and left out of that scenario; ours failing is a BenchError."""
        for turn in range(rounds):
            shift = turn % len(self.engines)
            order = [*self.engines[shift:], *self.engines[:shift]]
            for scenario in scenarios:
                for installed in order:
                    title = f"round {turn + 1}/{rounds}: {scenario.title}: {installed.peer.name}"
                    try:
                        figures = self._one(installed, scenario, turn, title, display)
                    except BenchError as error:
                        if installed.peer.name == OURS:
                            raise
                        self.failures.append(f"{scenario.name}, round {turn + 1}: {error}")
                        display.say(f"failed: {error}")
                        continue
                    entry = {"engine": installed.peer.name, "scenario": scenario.name, "round": turn + 1}
                    self.found.append({**entry, **figures})

    def _one(self, installed: Installed, scenario: Scenario, turn: int, title: str, display: Display) -> Figures:
        name = installed.peer.name
        with display.task(title) as tick:
            weights = self._weights(installed)
            with driving(installed, weights, scenario.settings) as driver:
                self.versions[name] = {**driver.versions, "preload": " ".join(installed.preloaded)}
                context = Context(self.vocab, f"{name}/{scenario.name}/{turn}", self.sizes)
                figures = scenario.measure(lambda load: driver.run(load, tick), context)
                return {**figures, "load_s": driver.load_s, "peak_rss_bytes": driver.peak_rss_bytes}

    def _weights(self, installed: Installed) -> Path:
        kind = installed.peer.weights
        if kind == "directory":
            return self.model.dir
        name = self.model.revision.rpartition(":")[2][:24]
        return export(self.model.dir, self.cache / f"{name}.{kind}.gguf", half=kind == "gguf-f16")

    def report(self, scenarios: Sequence[Scenario], parameters: Mapping[str, Any]) -> Report:
        """Everything measured, and the ratios."""
        versions: dict[str, Any] = {**software(), "engines": self.versions, "machine": machine()}
        versions |= {"model_revision": self.model.revision, "tokenizer_sha256": self.model.tokenizer_sha256}
        report = Report("peers", versions, {**parameters, "sizes": asdict(self.sizes)}, runs=self.found)
        names = list(dict.fromkeys(entry["engine"] for entry in self.found))
        report.extra = {
            "ratios": [
                ratio
                for scenario in scenarios
                for key, (what, best) in scenario.headlines.items()
                for ratio in self._ratios(scenario.name, key, what, best, names)
            ],
            "agreement": agreement({entry["engine"]: entry["answers"] for entry in self.found if "answers" in entry}),
            "failures": self.failures,
        }
        return report

    def _ratios(self, scenario: str, key: str, what: str, best: Best, names: Sequence[str]) -> list[dict[str, Any]]:
        values = {
            (entry["engine"], entry["round"]): entry[key]
            for entry in self.found
            if entry["scenario"] == scenario and entry.get(key)
        }
        made = []
        for name in names:
            if name == OURS:
                continue
            rounds = sorted(turn for engine, turn in values if engine == name and (OURS, turn) in values)
            pairs = [(values[OURS, turn], values[name, turn]) for turn in rounds]
            found = [mine / theirs if best == "higher" else theirs / mine for mine, theirs in pairs]
            if found:
                made.append({"figure": key, "scenario": scenario, "what": what, "peer": name, **spread(found)})
        return made


def of(target: Target, peers: Sequence[Installed], sizes: Sizes) -> Contest:
    """Ours, as the configuration under test has it, against ``peers``. Raises BenchError."""
    from workers.model.config import read_config
    from workers.model_store import cache_dir

    files = target.files()
    block = target.engine.model_dump(mode="json", exclude_defaults=True, exclude={"kv_cache", "blocks"})
    mine = ours({OVERRIDES: json.dumps(block)})
    return Contest([mine, *peers], files, read_config(files.dir).vocab, sizes, cache_dir() / "bench")


def throughput_runs(report: Report) -> dict[str, list[Figures]]:
    """Per engine: the runs of its first round, for plots."""
    first = (entry for entry in report.runs if entry["scenario"] == "throughput" and entry["round"] == 1)
    return {entry["engine"]: entry["runs"] for entry in first}


def agreement(answers: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, float]:
    """Per peer: the mean part of our greedy answers, from their first token on, that it gives as well.

    Equal weights in bfloat16 drift apart sooner or later; other weights differ from the first tokens on.
    """
    mine = answers.get(OURS, [])
    found = {}
    for name, theirs in answers.items():
        if name != OURS and mine:
            parts = [_common(a, b) / max(1, len(a)) for a, b in zip(mine, theirs, strict=True)]
            found[name] = round(statistics.mean(parts), 3)
    return found


def _common(mine: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


def tables(report: Report, scenarios: Sequence[Scenario]) -> list[Table]:
    """Medians of every engine with ours' ratio to the best peer, and each ratio with its spread."""
    names = list(dict.fromkeys(entry["engine"] for entry in report.runs))
    ratios = report.extra["ratios"]
    main = Table("medians", ("figure", *names, "ours : best peer"))
    for scenario in scenarios:
        for key, (what, best) in scenario.headlines.items():
            medians = {name: _median(report.runs, scenario.name, name, key) for name in names}
            others = [value for name, value in medians.items() if name != OURS and value is not None]
            mine = medians.get(OURS)
            ratio = None
            if others and mine:
                rival = max(others) if best == "higher" else min(others)
                ratio = mine / rival if best == "higher" else rival / mine
            cells: list[Cell] = [what, *(medians[name] for name in names), ratio]
            main.add(*cells)
    main.notes = ["Ratios above 1: ours is better."]
    agreed = ", ".join(f"{name} {share:.0%}" for name, share in report.extra["agreement"].items())
    if agreed:
        main.notes.append(f"Greedy answers in common with ours: {agreed}.")
    each = Table("ratios by round", ("figure", "peer", "median", "low", "high", "rounds"))
    for item in ratios:
        each.add(item["what"], item["peer"], item["ratio"], item["low"], item["high"], item["rounds"])
    each.notes = [f"failed: {failure.splitlines()[0]}" for failure in report.extra["failures"]]
    return [main, each]


def _median(runs: Sequence[dict[str, Any]], scenario: str, name: str, key: str) -> float | None:
    values = [run[key] for run in runs if run["scenario"] == scenario and run["engine"] == name and run.get(key)]
    return statistics.median(values) if values else None
