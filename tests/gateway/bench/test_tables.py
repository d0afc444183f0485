"""The tables, on a tiny model: what they promise about tokens, rows and blocks; never how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.bench import load
from gateway.bench.display import Display
from gateway.bench.engine import BenchEngine
from gateway.bench.load import Timeline
from gateway.bench.render import Table, text
from gateway.bench.report import BenchError, read
from gateway.bench.tables import batching, beam, catalogue, kv_memory, pressure
from gateway.bench.tables.lab import Lab, Sizes
from gateway.bench.target import Target
from gateway.cli.commands import app
from tests.gateway.bench.conftest import ENGINE
from workers.config import EngineConfig

TINY = Sizes(
    answer=(8, 12),
    repeats=1,
    requests=9,
    inputs=(4, 8),
    outputs=(3, 6),
    slots=4,
    stream=(8, 24),
    stream_at=4,
    long_prompts=2,
    long_prompt=100,
    chunks=(32, 128),
    prefix=64,
    prefix_own=8,
    prefix_later=2,
    distinct=(32, 3, 4),
    distinct_rounds=1,
    pool_tokens=320,
    pressure=((32, 16, 1), (32, 16, 4), (64, 80, 8)),
    memory_requests=30,
    memory_inputs=(4, 40),
    memory_outputs=(4, 20),
    memory_running=8,
    reserved=64,
    block_sizes=(8, 32),
    widths=(2, 3),
    shared=(64, 20),
    beam=(40, 8),
)


@pytest.fixture(scope="module")
def made(model_dir: Path) -> dict[str, Table]:
    """All tables by the beginning of their titles."""
    target = Target(str(model_dir), Path.cwd(), EngineConfig.model_validate(ENGINE))
    with Display() as display:
        report, tables = catalogue.tables_report(target, display, list(catalogue.TABLES), TINY)
    json.dumps(report.to_json())
    assert len(report.runs) == len(tables)
    return {table.title.split(".")[0]: table for table in tables}


def column(table: Table, name: str) -> list[Any]:
    index = list(table.columns).index(name)
    return [row[index] for row in table.rows]


def test_1_the_cache_changes_rows_and_not_tokens(made: dict[str, Table]) -> None:
    """8 in, 12 out: 8 + 11 rows kept; 8 + 9 + … + 19 without."""
    assert column(made["1"], "rows projected") == [19, sum(range(8, 20))]
    assert column(made["1"], "same tokens") == [True, True]


def test_the_published_rows() -> None:
    """16 in, 48 out: 63 rows against 1,896, as in the literature."""
    assert 16 + 47 == 63
    assert sum(range(16, 16 + 48)) == 1896
    assert Sizes().answer == (16, 48)


def test_2_every_way_of_batching_is_there(made: dict[str, Table]) -> None:
    assert column(made["2"], "batching") == [
        "one at a time, no cache",
        "one at a time, cache",
        "static 4, padded",
        "static 4",
        "continuous 4",
    ]
    assert column(made["2"], "to the last")[-1] == 1


def test_padding_is_to_the_longest_of_each_batch() -> None:
    shapes = [(4, 9), (7, 3), (5, 5), (1, 1)]
    assert batching.padded(shapes, 3) == [(7, 9), (7, 9), (7, 9), (1, 1)]
    lines = [Timeline("a", 7, 0.0, [1.0, 2.0, 3.0], finished=3.0)]
    [line] = batching.trimmed(lines, [(4, 2)])
    assert (line.input_tokens, line.times, line.finished) == (4, [1.0, 2.0], 3.0)


def test_3_every_chunk_and_every_prompt_is_there(made: dict[str, Table]) -> None:
    assert column(made["3"], "chunk") == ["32", "128"]
    assert all(len(cell.split(", ")) == 2 for cell in column(made["3"], "TTFT of the prompts s"))


def test_4_hits_with_the_cache_and_none_without(made: dict[str, Table]) -> None:
    assert column(made["4a"], "hit tokens") == [128, 0]
    assert column(made["4b"], "prefix cache") == ["on", "off"]


def test_5_the_small_pool_throws_work_away(made: dict[str, Table]) -> None:
    """Eight answers of 144 tokens in a pool of 320 cannot all stay; one of 48 can."""
    preemptions = column(made["5"], "preemptions")
    assert preemptions[0] == 0
    assert preemptions[-1] > 0
    assert column(made["5"], "under way") == [1, 4, 8]


def test_where_throughput_turns_down() -> None:
    def run(concurrency: int, rate: float) -> dict[str, Any]:
        return {"input": 1, "output": 2, "concurrency": concurrency, "output_tokens_s": rate}

    assert "turns down after 8 under way (by 25%" in pressure.turning_point([run(1, 50), run(8, 100), run(32, 75)])
    assert "still rises at 8" in pressure.turning_point([run(1, 50), run(8, 100)])


def test_6_paged_memory_holds_more_than_reserved(made: dict[str, Table]) -> None:
    small, large, reserved = (float(cell.rstrip("%")) for cell in column(made["6a"], "holds tokens"))
    assert small > large > reserved


def test_6_samples_share_exactly_their_prompt(made: dict[str, Table]) -> None:
    """64 in / 20 out in blocks of 16: four blocks of prompt, two of answer per sample (83 tokens are computed)."""
    assert column(made["6b"], "blocks shared") == [4 + 2 * 2, 4 + 3 * 2]
    assert column(made["6b"], "blocks apart") == [2 * 6, 3 * 6]


def test_6_beams_share_their_prompt_and_their_past(made: dict[str, Table]) -> None:
    """40 in / 8 out in blocks of 16: two full blocks of prompt are there once, of the third one per beam at most."""
    assert all(
        2 < most <= 2 + width for most, width in zip(column(made["6c"], "most blocks shared"), TINY.widths, strict=True)
    )
    assert column(made["6c"], "most blocks apart") == [2 * 3, 3 * 3]
    assert all(0 < float(cell.rstrip("%")) < 100 for cell in column(made["6c"], "saved, mean"))


def test_a_search_tells_its_answers_and_leaves_nothing(engine: BenchEngine) -> None:
    prompt = load.prompt("beam", 10, engine.vocab)
    found = beam.search(engine, prompt, 5, 6)
    assert [len(answer) for answer in found.beams] == [6] * 5
    assert len({tuple(answer) for answer in found.beams}) == 5
    assert len(found.shared) == len(found.apart) == 5, "after the prompt, one step per token but the last"
    with pytest.raises(BenchError, match="refused a search of 100 beams"):
        beam.search(engine, prompt, 100, 6)


def test_holding_by_hand() -> None:
    """One request, 6 in / 3 out, blocks of 4: computed 6, 7 of 8 slots; then it ends."""
    from workers.protocol import Generate, SamplingParams

    request = Generate("a", list(range(100, 106)), 3, SamplingParams(seed=0, ignore_eos=True))
    held = kv_memory.hold([request], block_size=4, running=1)
    assert held.peak == 2
    assert held.share == pytest.approx((6 / 8 + 7 / 8) / 2)


def test_the_command(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.bench.tables import lab

    monkeypatch.setattr(lab, "QUICK", TINY)
    out, page = tmp_path / "t.json", tmp_path / "t.md"
    words = ["--config", str(config_file), "--quick", "--only", "1", "--json", str(out), "--markdown", str(page)]
    done = CliRunner().invoke(app, ["bench", "tables", *words])
    assert done.exit_code == 0, done.output
    assert read(out)["runs"][0]["table"] == 1
    assert page.read_text().startswith("### 1. One 12-token answer")
    assert "| kept |" in page.read_text()


def test_numbers() -> None:
    assert catalogue.numbers("") == [1, 2, 3, 4, 5, 6]
    assert catalogue.numbers("3,1") == [1, 3]
    for wrong in ("7", "0", "x", "1,"):
        with pytest.raises(BenchError, match="--only"):
            catalogue.numbers(wrong)


def test_cells_as_text() -> None:
    cells = [text(cell) for cell in (None, True, False, 12345, 12345.6, 123.45, 1.23456, "x")]
    assert cells == ["-", "yes", "no", "12,345", "12,346", "123.5", "1.235", "x"]
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Table("t", ("a",)).add(1, 2)


def test_a_lab_keeps_the_other_settings(model_dir: Path) -> None:
    lab = Lab(Target(str(model_dir), Path.cwd(), EngineConfig.model_validate(ENGINE)), Display())
    with lab.engine(max_running=3) as engine:
        assert (engine.config.max_running, engine.config.block_size) == (3, 16)
    assert lab.blocks(5) == 2
