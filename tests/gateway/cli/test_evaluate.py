"""``forebay eval`` on a tiny random model: real engines, real tasks, both verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.commands import app
from gateway.cli.output import UserError
from tests.workers import tiny_model

SMALL = ["--set", "dtype=float32", "--set", "kv_cache=4MiB", "--set", "threads=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments])


def test_a_lossy_switch_is_compared_with_none(model: Path) -> None:
    """The same tasks twice; the agreement shows that the switch did something; half the bytes per token."""
    result = run(str(model), *SMALL, "--set", "kv_dtype=int8", "--max-drop", "100", "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = {row["task"]: row for row in report["tasks"]}
    assert set(rows) > {"perplexity-en", "perplexity-zh", "arithmetic", "code", "agreement"}
    assert 0.5 < rows["agreement"]["after"]["value"] < 1
    assert rows["perplexity-de"]["before"]["value"] != rows["perplexity-de"]["after"]["value"]
    assert not any(row["failed"] for row in rows.values())
    assert "retrieval" not in rows
    assert "retrieval: left out, a context of 512 tokens holds none of its texts" in result.stderr
    assert report["after"]["kv_bytes_per_token"] < 0.6 * report["before"]["kv_bytes_per_token"]


def test_losing_more_than_allowed_is_exit_1(model: Path) -> None:
    result = run(
        str(model), *SMALL, "--set", "kv_dtype=int8", "--only", "agreement,perplexity-en", "--max-drop", "agreement=0"
    )
    assert isinstance(result.exception, UserError)
    assert result.exception.code == 1
    assert str(result.exception) == "lost more than allowed: agreement"
    assert "too much" in result.stdout


def test_exact_settings_lose_nothing(model: Path) -> None:
    """And it says that there was nothing to compare."""
    result = run(str(model), *SMALL, "--only", "perplexity-fr,agreement", "--max-drop", "0")
    assert result.exit_code == 0, result.output
    assert "No lossy switch is on" in result.stderr
    assert "100.0 %" in result.stdout


def test_against_a_configuration(model: Path, tmp_path: Path) -> None:
    """The model is named as the file names it; the file's pool says what is tried."""
    config = tmp_path / "try.yaml"
    config.write_text(
        f"""
policies: {{auth: {{use: none, with: {{tenant: a}}}}}}
tenants: [{{id: a}}]
models:
  - name: tiny
    source: {model}
    pools: [{{name: local, launch: {{use: local, count: 1}},
              engine: {{dtype: float32, kv_cache: 4MiB, threads: 1, kv_dtype: int8}}}}]
"""
    )
    result = run("tiny", "--against", str(config), "--only", "perplexity-es", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert "perplexity-es" in result.stdout
    [row] = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert row["after"] is not None


def test_alone_it_only_tells(model: Path) -> None:
    result = run(str(model), "--only", "perplexity-en")
    assert result.exit_code == 0, result.output
    assert "–" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "cooking"], "'cooking' is no task"),
        (["--max-drop", "much"], "--max-drop 'much'"),
        (["--set", "kv_dtype=int3"], "engine.kv_dtype"),
        (["--pool", "local"], "--pool names a pool of --against"),
        (["--against", "no-such-file.yaml"], "no-such-file"),
    ],
)
def test_mistakes_are_named(model: Path, arguments: list[str], says: str) -> None:
    result = run(str(model), *arguments)
    assert isinstance(result.exception, UserError)
    assert says in str(result.exception)


def test_a_model_that_is_not_there_is_named() -> None:
    result = run("no/such/model")
    assert isinstance(result.exception, UserError)
    assert "no/such/model" in str(result.exception)
