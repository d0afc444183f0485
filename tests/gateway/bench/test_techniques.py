"""Each technique's row comes of real engines, and a switch that did nothing would show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.bench import techniques
from gateway.bench.load import Request
from gateway.bench.report import BenchError
from gateway.cli.commands import app


def test_rows_of_a_tiny_model(config_file: Path, tmp_path: Path) -> None:
    """KV in eight bits: fewer bytes; a technique that this engine refuses says why, and the others are run."""
    out = tmp_path / "out.json"
    arguments = ["--only", "kv_dtype int8,prefix_cache", "--input", "24", "--output", "4", "--rounds", "1"]
    result = CliRunner().invoke(
        app, ["bench", "techniques", "--config", str(config_file), *arguments, "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    rows = {run["technique"]: run for run in json.loads(out.read_text())["runs"]}
    assert set(rows) == {"kv_dtype int8", "prefix_cache off"}
    assert rows["kv_dtype int8"]["kv_ratio"] < 0.6
    assert rows["kv_dtype int8"]["weights_ratio"] == rows["prefix_cache off"]["kv_ratio"] == 1
    assert all(run["ratio_low"] <= run["ratio"] <= run["ratio_high"] for run in rows.values())
    assert "kv_dtype int8" in result.stdout


def test_a_refusal_is_a_row(config_file: Path) -> None:
    """With the reason below the table."""
    result = CliRunner().invoke(
        app,
        ["bench", "techniques", "--config", str(config_file), "--set", "kv_cache_reuse=false", "--only", "speculation",
         "--input", "8", "--output", "2", "--rounds", "1"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "speculation ngram, other: engine" in result.stdout
    assert "kv_cache_reuse" in result.stdout


def test_a_name_that_none_begins_with_is_told() -> None:
    with pytest.raises(BenchError, match=r"'magic' is no technique.*kv_dtype int8"):
        techniques.pick(["magic"])
    assert [one.name for one in techniques.pick(["weight_dtype int4"])] == [
        "weight_dtype int4, 1 running",
        "weight_dtype int4, 32 running",
    ]


def test_copying_prompts_repeat_themselves() -> None:
    """As long as asked, and every token past the first passage was said before."""
    made = techniques._repeating(Request("r", tuple(range(500, 600)), 4))
    assert len(made.tokens) == 100
    assert made.tokens[33:66] == made.tokens[:33]
