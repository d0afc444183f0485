"""Scenarios and ratios: arithmetic by hand, and a real contest of our engine against itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.bench import pump
from gateway.bench.display import Display
from gateway.bench.load import Load, Timeline
from gateway.bench.peers import contest, known, scenarios
from gateway.bench.peers.contest import Contest
from gateway.bench.peers.known import OURS, Installed, Peer
from gateway.bench.peers.scenarios import Context, Scenario, Sizes
from gateway.bench.peers.wire import Settings
from gateway.bench.report import BenchError, read
from gateway.bench.target import Target
from gateway.cli.commands import app
from tests.gateway.bench.conftest import ENGINE
from tests.gateway.bench.peers.test_wire import Echo
from workers.config import EngineConfig

SIZES = Sizes(
    input=24,
    output=4,
    concurrency=(1, 2),
    prefix=64,
    prefix_own=8,
    prefix_repeats=2,
    long_prompt=60,
    long_prompts=2,
    chunks=(64, 32),
    stream=(8, 20),
    stream_at=4,
    burst=5,
    burst_input=(4, 8),
    burst_output=(3, 6),
    burst_running=(2,),
    answer=6,
)
BASE = Settings(dtype="float32", threads=1)
ALL = scenarios.scenarios(SIZES, BASE)


def run_on_echo(scenario: Scenario, label: str = "x") -> tuple[dict[str, Any], list[Load]]:
    """A scenario's figures on an engine that echoes, and the loads it asked for."""
    asked: list[Load] = []

    def run(load: Load) -> list[Timeline]:
        asked.append(load)
        return pump.run(Echo("m", scenario.settings), load)

    return scenario.measure(run, Context(5000, label, SIZES)), asked


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_every_headline_has_a_figure_and_every_load_fits(scenario: Scenario) -> None:
    figures, asked = run_on_echo(scenario)
    assert set(scenario.headlines) <= set(figures)
    settings = scenario.settings
    assert all(load.longest <= settings.max_context for load in asked)
    for load in asked:
        running = min(load.concurrency or len(load.requests), settings.max_running)
        assert running * load.longest <= settings.kv_tokens
    assert (settings.dtype, settings.threads) == ("float32", 1)
    json.dumps(figures)


def test_no_prompt_is_seen_twice_by_an_engine_except_to_compare() -> None:
    seen: list[tuple[int, ...]] = []
    for turn in range(2):
        for scenario in ALL:
            _, asked = run_on_echo(scenario, f"forebay/{scenario.name}/{turn}")
            requests = [request for load in asked if not load.keep_answers for request in load.requests]
            prefixed = [r for r in requests if len(r.tokens) == 72]
            seen += [request.tokens[:4] for request in requests if len(request.tokens) != 72]
            assert len({r.tokens[:64] for r in prefixed}) == len(prefixed) // 2
    assert len(set(seen)) == len(seen)


def test_scenarios_by_name() -> None:
    assert [item.name for item in ALL] == ["throughput", "gap-64", "gap-32", "burst-2"]
    assert [item.name for item in scenarios.pick(ALL, ["gap"])] == ["gap-64", "gap-32"]
    assert scenarios.pick(ALL, []) == ALL
    with pytest.raises(BenchError, match="--only 'speed'"):
        scenarios.pick(ALL, ["speed"])
    assert [item.settings.max_step_tokens for item in ALL] == [None, 64, 32, None]


def entry(engine: str, turn: int, tokens_s: float, gap: float | None = None) -> dict[str, Any]:
    return {"engine": engine, "scenario": "s", "round": turn, "tokens_s": tokens_s, "gap": gap}


def test_ratios_are_above_one_where_ours_is_better(model_dir: Path) -> None:
    race = contest.of(target(model_dir), [], SIZES)
    race.found = [
        entry(OURS, 1, 200, 10), entry("peer", 1, 100, 30), entry(OURS, 2, 90), entry("peer", 2, 60),
        entry("late", 2, 45),
    ]  # fmt: skip
    headlines: Any = {"tokens_s": ("tokens", "higher"), "gap": ("gap", "lower")}
    chosen = [Scenario("s", "s", BASE, lambda run, context: {}, headlines)]
    report = race.report(chosen, {})
    found = {(item["figure"], item["peer"]): item for item in report.extra["ratios"]}
    assert found["tokens_s", "peer"]["ratio"] == 1.75
    assert (found["tokens_s", "peer"]["low"], found["tokens_s", "peer"]["high"]) == (1.5, 2)
    assert found["gap", "peer"]["ratio"] == 3
    assert found["tokens_s", "late"]["rounds"] == 1
    medians, _ = contest.tables(report, chosen)
    # 145 against the best peer's 80.
    assert medians.rows[0] == ["tokens", 145, 80, 45, 145 / 80]


def test_agreement_is_the_common_beginning() -> None:
    mine = [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = contest.agreement({OURS: mine, "same": mine, "other": [[1, 2, 9, 4], [0, 6, 7, 8]]})
    assert found == {"same": 1.0, "other": 0.25}


def target(model_dir: Path) -> Target:
    return Target(str(model_dir), model_dir, EngineConfig.model_validate(ENGINE))


def test_a_real_contest_and_a_peer_that_fails(model_dir: Path) -> None:
    twin = Installed(
        Peer("twin", "drive_forebay", "workers", "directory", ""), Path(sys.executable), twin_environment()
    )
    broken = Installed(Peer("broken", "drive_nothing", "workers", "directory", ""), Path(sys.executable))
    race = contest.of(target(model_dir), [twin, broken], SIZES)
    chosen = scenarios.pick(ALL, ["throughput"])
    with Display() as display:
        race.go(chosen, 1, display)
    report = race.report(chosen, {})
    assert [run["engine"] for run in report.runs] == [OURS, "twin"]
    assert all(run["output_tokens_s_2"] > 0 and run["prefix_hit_ttft_ms"] > 0 for run in report.runs)
    assert report.extra["agreement"] == {"twin": 1.0}
    assert {item["peer"] for item in report.extra["ratios"]} == {"twin"}
    assert len(report.extra["failures"]) == 1
    assert "broken" in report.extra["failures"][0]
    assert report.versions["engines"][OURS]["torch"]
    json.dumps(report.to_json())


def twin_environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[4]
    return {"PYTHONPATH": str(root), known.OVERRIDES: json.dumps({"block_size": 16})}


def test_ours_failing_ends_it(model_dir: Path) -> None:
    race = contest.of(target(model_dir), [], SIZES)
    race.engines = [Installed(known.SELF, Path(sys.executable), {known.OVERRIDES: '{"block_size": 0}'})]
    with Display() as display, pytest.raises(BenchError, match="block_size"):
        race.go(scenarios.pick(ALL, ["burst"]), 1, display)


def test_the_order_rotates(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def one(self: Contest, installed: Installed, *_: object) -> dict[str, Any]:
        order.append(installed.peer.name)
        return {}

    monkeypatch.setattr(Contest, "_one", one)
    race = contest.of(
        target(model_dir), [Installed(known.PEERS[1], Path("x")), Installed(known.PEERS[2], Path("x"))], SIZES
    )
    with Display() as display:
        race.go(scenarios.pick(ALL, ["burst"]), 3, display)
    names = [OURS, "openvino", "llama.cpp"]
    assert order == [*names, *names[1:], names[0], names[2], *names[:2]]


def test_the_command_without_any_peer(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in known.PEERS:
        monkeypatch.delenv(peer.variable, raising=False)
    out = tmp_path / "peers.json"
    words = ["--config", str(config_file), "--only", "burst-16", "--burst", "3", "--rounds", "1", "--dtype", "float32"]
    done = CliRunner().invoke(app, ["bench", "peers", *words, "--threads", "1", "--json", str(out)])
    assert done.exit_code == 0, done.output
    data = read(out)
    assert [run["scenario"] for run in data["runs"]] == ["burst-16"]
    assert data["runs"][0]["failed"] == 0
    assert data["ratios"] == []
