"""Alternation, ratios and verdicts; commands that misbehave; and the command on a tiny model."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.bench import compare
from gateway.bench.display import Display
from gateway.bench.report import BenchError, read
from gateway.cli.commands import app
from gateway.cli.output import UserError


def report(tokens_s: float, ttft: float = 10.0, concurrency: int = 1) -> dict[str, Any]:
    return {"runs": [{"concurrency": concurrency, "output_tokens_s": tokens_s, "ttft_p50_ms": ttft}]}


def test_ratios_are_made_within_a_round() -> None:
    """Each round is twice as slow as the one before; the ratio does not notice."""
    found = compare.ratios([(report(100), report(150)), (report(50), report(75)), (report(25), report(40))])
    by_figure = {item["figure"]: item for item in found}
    assert by_figure["output_tokens_s"] == {
        "load": "1 running",
        "figure": "output_tokens_s",
        "best": "higher",
        "ratio": 1.5,
        "low": 1.5,
        "high": 1.6,
        "rounds": 3,
        "clear": True,
    }
    assert by_figure["ttft_p50_ms"]["clear"] is False


def test_a_verdict_needs_all_rounds_on_one_side() -> None:
    assert compare.spread([1.2, 0.9])["clear"] is False
    assert compare.spread([1.2, 1.1])["clear"] is True
    assert compare.spread([0.8, 0.9])["clear"] is True
    assert compare.spread([1.5])["clear"] is False


def test_no_common_load_is_an_error() -> None:
    with pytest.raises(BenchError, match="no load in common"):
        compare.ratios([(report(1, concurrency=1), report(1, concurrency=8))])


def script(tmp_path: Path, name: str, rate: float) -> str:
    """A command that writes a report and notes that it ran."""
    path = tmp_path / f"{name}.py"
    path.write_text(
        "import json, sys, pathlib\n"
        f"with open({str(tmp_path / 'order')!r}, 'a') as f: f.write({name!r})\n"
        f"pathlib.Path(sys.argv[1]).write_text({json.dumps(json.dumps(report(rate)))})\n"
    )
    return shlex.join([sys.executable, str(path)]) + " {json}"


def test_commands_run_in_alternating_order(tmp_path: Path) -> None:
    sides = (compare.side(script(tmp_path, "a", 10), []), compare.side(script(tmp_path, "b", 30), []))
    with Display() as display:
        made = compare.compare(sides, 3, display)
    assert (tmp_path / "order").read_text() == "abbaab"
    assert made.extra["ratios"][0]["ratio"] == 3
    assert [f"{run['side']}{run['round']}" for run in made.runs] == ["A1", "B1", "B2", "A2", "A3", "B3"]
    verdicts = {row[1]: row[-1] for row in compare.table(made).rows}
    assert verdicts == {"output_tokens_s": "B is better", "ttft_p50_ms": "no clear difference"}


def test_a_command_may_write_to_its_standard_output() -> None:
    one = compare.side(shlex.join([sys.executable, "-c", f"print({json.dumps(json.dumps(report(5)))})"]), [])
    with Display() as display:
        made = compare.compare((one, one), 1, display)
    assert made.extra["ratios"][0]["ratio"] == 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('the reason', file=sys.stderr); sys.exit(4)", "ended with 4:\n    the reason"),
        ("print('hello')", "no JSON"),
        ("print('{}')", "no report"),
    ],
)
def test_commands_that_misbehave(program: str, message: str) -> None:
    one = compare.side(shlex.join([sys.executable, "-c", program]), [])
    with Display() as display, pytest.raises(BenchError, match=message):
        compare.compare((one, one), 1, display)


def test_what_is_neither_configuration_nor_command() -> None:
    one = compare.side("no-such-thing-anywhere", [])
    with Display() as display, pytest.raises(BenchError, match="neither a configuration nor a command"):
        compare.compare((one, one), 1, display)
    with pytest.raises(BenchError, match="nothing to compare"):
        compare.side("  ", [])


def test_a_configuration_against_a_command(config_file: Path, tmp_path: Path) -> None:
    """The configuration is measured by ``bench engine``; the command reports the same load, very fast."""
    out = tmp_path / "compare.json"
    words = [str(config_file), script(tmp_path, "b", 1e12), "--rounds", "1", "--input", "16", "--output", "4"]
    words += ["--concurrency", "1", "--requests", "2", "--json", str(out)]
    done = CliRunner().invoke(app, ["bench", "compare", *words])
    assert done.exit_code == 0, done.output
    data = read(out)
    assert {item["figure"] for item in data["ratios"]} == {"output_tokens_s", "ttft_p50_ms"}
    assert data["ratios"][0]["ratio"] > 1
    assert data["runs"][0]["requests"] == 2
    assert "no clear difference" in done.stdout


def test_mistakes_are_named() -> None:
    done = CliRunner().invoke(app, ["bench", "compare", "demo", "demo", "--concurrency", "x"])
    assert isinstance(done.exception, UserError)
