"""``bench gateway``: all of it, on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.bench.gateway_cost import gateway_table
from gateway.bench.render import text
from gateway.cli.commands import app


def test_a_row_per_run() -> None:
    runs = [
        {
            "name": "rate",
            "requests": 3,
            "failed": 1,
            "requests_s": 9.5,
            "e2e_p50_ms": 1.5,
            "added_p50_ms": 0.5,
            "gateway_cpu_us": 700,
        },
        {"name": "probe", "requests": 2, "healthz_p50_ms": 0.25, "healthz_p99_ms": 4.0},
    ]
    table = gateway_table(runs)
    assert [[text(cell) for cell in row] for row in table.rows] == [
        ["rate", "3", "1", "9.5", "-", "1.5", "-", "0.5", "-", "700"],
        ["probe", "2", "0", "-", "-", "0.25", "4", "-", "-", "-"],
    ]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_run_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["bench", "gateway", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    runs = json.loads(path.read_text())["runs"]
    assert len(runs) == 16
    assert all(run.get("failed", 0) == 0 for run in runs), runs
    assert all(run["large"]["requests"] for run in runs if "large" in run)
