"""``bench start``: a real worker's start, and a request that it must refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
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
    assert 9 * 2 * 16 * per_token <= run["kv_filled_bytes"] <= run["kv_bytes"], "full blocks stay cached"
    assert run["rest_bytes"] == run["peak_rss_bytes"] - run["weight_bytes"] - run["kv_filled_bytes"] > 50 * 2**20
    assert run["ready_s"] > 0 < run["answered_s"]
    versions = report["versions"]
    assert (versions["device"], versions["dtype"]) == ("cpu", "float32")
    assert versions["kernels"] == "batched", "its heads are of 8 numbers"
    assert len(versions["tokenizer_sha256"]) == 64


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--input", "600"], "its context has 512, its cache room for 512; ask for less --input"),
        (["--set", "cores=4000-4001"], "core 4000-4001 is not there for this process"),
    ],
    ids=["too long", "cannot start"],
)
def test_a_worker_that_refuses_or_ends_says_why(config_file: Path, options: list[str], why: str) -> None:
    words = ["bench", "start", "--config", str(config_file), "--rounds", "1", "--running", "1", *options]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert isinstance(done.exception, UserError)
    assert why in str(done.exception)
