"""The 1,000-request table (issue 4): the shipped scenario, in full, against what the docs say of it."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.simulate.batching import Row, table
from tests.gateway.simulate.scenarios import shipped

DOCS = Path(__file__).parents[3] / "docs" / "simulator.md"


def documented() -> dict[str, list[float]]:
    """Way → total seconds, output tokens/s, mean latency, times as fast."""
    section = DOCS.read_text().partition("## Batching, from step times")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\S.*?) \| ([\d,]+) s \| (\d+) \| ([\d,]+) s \| ([\d.]+) \|$", section, re.MULTILINE)
    return {way: [float(figure.replace(",", "")) for figure in figures] for way, *figures in rows}


def test_the_shipped_table_is_the_documented_one() -> None:
    rows = table(shipped("batching"))
    whole = rows[0].total_s

    def figures(row: Row) -> list[float]:
        assert row.latency_mean_s is not None
        return [
            round(row.total_s),
            round(row.output_tokens_s),
            round(row.latency_mean_s),
            round(whole / row.total_s, 1),
        ]

    assert {row.way: figures(row) for row in rows} == documented()
    one, cached, static, continuous = (row.total_s for row in rows)
    assert one > 4 * cached > 4 * 3 * static > 4 * 3 * 3 * continuous
    assert len({round(row.output_tokens_s * row.total_s) for row in rows}) == 1, "the same tokens in every way"
