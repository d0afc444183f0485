"""``bench start``: a real worker's start, and a request that it must refuse."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from gateway.bench.report import read
from gateway.cli.commands import app
from gateway.cli.output import UserError
from tests.workers import tiny_model


def test_a_workers_start_and_its_memory(config_file: Path, tmp_path: Path) -> None:
    """Weights and cache are as configured; what it held at most is more than both: torch was loaded in it."""
    path = tmp_path / "start.json"
    options = ["--config", str(config_file), "--rounds", "1", "--running", "9", "--input", "40", "--output", "3"]
    done = CliRunner().invoke(app, ["bench", "start", *options, "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "ready s" in done.output
    report = read(path)
    [run] = report["runs"]
    per_token = 2 * tiny_model.KV_HEADS * tiny_model.HEAD_DIM * 4
    assert run["kv_bytes"] == 96 * 16 * per_token
    assert run["weight_bytes"] > tiny_model.VOCAB * tiny_model.HIDDEN * 4
    assert run["rest_bytes"] == run["peak_rss_bytes"] - run["weight_bytes"] - run["kv_bytes"] > 50 * 2**20
    assert run["ready_s"] > 0 < run["answered_s"]
    json.dumps(report)


def test_what_does_not_fit_is_said(config_file: Path) -> None:
    options = ["--config", str(config_file), "--rounds", "1", "--running", "1", "--input", "600"]
    done = CliRunner().invoke(app, ["bench", "start", *options])
    assert done.exit_code == 1
    assert isinstance(done.exception, UserError)
    assert "context has 512" in str(done.exception)
    assert "--input" in str(done.exception)
