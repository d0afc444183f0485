"""The real engine under the pump, with a tiny model; and the command around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.bench import load, report
from gateway.bench.engine import BenchEngine, measure, open_engine, overridden, waves
from gateway.bench.report import BenchError
from gateway.cli.commands import app
from gateway.cli.output import UserError
from tests.gateway.bench.conftest import ENGINE
from workers.config import EngineConfig

KEYS = {
    "concurrency",
    "output_tokens_s",
    "total_tokens_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
}
"""What readers of the JSON rely on."""


def test_every_token_is_counted_and_timed(engine: BenchEngine) -> None:
    lines = engine.run(load.uniform("t", 6, 40, 7, engine.vocab, 3))
    assert [line.outputs for line in lines] == [7] * 6
    assert all(line.error is None and line.cached == 0 for line in lines)
    for line in lines:
        assert line.scheduled is not None
        assert line.submitted <= line.scheduled <= line.times[0] <= line.times[-1]
        assert line.times == sorted(line.times)
    # 40 prompt rows, and one for each token but the last.
    assert engine.steps.rows == 6 * (40 + 6)


def test_end_tokens_do_not_shorten_an_answer(model_dir: Path) -> None:
    """Every token of the vocabulary is an end token here."""
    engine = open_engine(str(model_dir), EngineConfig.model_validate(ENGINE))
    object.__setattr__(engine.loaded, "eos_ids", frozenset(range(engine.vocab)))
    engine = BenchEngine(engine.loaded, engine.config)
    [line] = engine.run(load.uniform("t", 1, 5, 9, engine.vocab, 1))
    assert line.outputs == 9


def test_a_repeated_prefix_shows_as_hit(engine: BenchEngine) -> None:
    first, second = engine.run(load.common_prefix("p", 2, 64, 16, 2, engine.vocab))
    assert (first.cached, second.cached) == (0, 64)


def test_choices_of_one_prompt_end_together_with_the_last(engine: BenchEngine) -> None:
    request = load.Request("n", load.prompt("n", 20, engine.vocab), 5, n=3)
    [line] = engine.run(load.Load((request,)))
    assert line.outputs == 15


def test_a_run_has_no_hits_and_whole_waves(engine: BenchEngine) -> None:
    run = measure(engine, "m", input_tokens=32, output_tokens=4, concurrency=3)
    assert set(run) >= KEYS
    assert run["requests"] == waves(3) == 9
    assert run["output_tokens"] == 36
    assert run["cached_tokens"] == 0
    assert run["failed"] == 0
    assert 0 < run["bookkeeping_share"] < 1
    assert (waves(1), waves(8), waves(32)) == (8, 8, 32)


def test_what_does_not_fit_is_refused_beforehand(engine: BenchEngine) -> None:
    with pytest.raises(BenchError, match="context of 512"):
        measure(engine, "m", input_tokens=510, output_tokens=4, concurrency=1)


def test_a_model_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="does not exist"):
        open_engine(str(tmp_path / "none"), EngineConfig())


def test_settings_on_top() -> None:
    config = overridden(EngineConfig(), ["max_running=3", "kv_cache=2MiB", "prefix_cache=false"])
    assert (config.max_running, config.kv_cache, config.prefix_cache) == (3, 2 * 2**20, False)
    with pytest.raises(BenchError, match=r"engine\.max_runing"):
        overridden(EngineConfig(), ["max_runing=3"])
    with pytest.raises(BenchError, match="key=value"):
        overridden(EngineConfig(), ["max_running"])


def test_the_command_writes_the_report(config_file: Path, tmp_path: Path) -> None:
    out, plots = tmp_path / "sub" / "engine.json", tmp_path / "plots"
    words = ["bench", "engine", "--config", str(config_file), "--input", "24", "--output", "4", "--concurrency", "1,2"]
    words += ["--no-floor", "--slo-ttft-ms", "60000", "--json", str(out), "--plots", str(plots)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    data = report.read(out)
    assert [run["concurrency"] for run in data["runs"]] == [1, 2]
    assert all(set(run) >= KEYS and run["failed"] == 0 and run["goodput_share"] == 1 for run in data["runs"])
    versions = data["versions"]
    for key in ("torch", "kernels", "model_revision", "tokenizer_sha256", "device", "dtype", "machine"):
        assert versions[key], key
    assert data["sizes"]["peak_rss_bytes"] > data["sizes"]["weight_bytes"] > 0
    assert "out tok/s" in done.stdout
    assert all(f"{run['bookkeeping_share']:.2%}" in done.stdout for run in data["runs"])
    assert (plots / "output_tokens_s.png").read_bytes().startswith(b"\x89PNG")


def test_the_floor_is_beside_the_figure(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.model import roofline

    rates = roofline.Rates("cpu", 1, 50e9, {"float32": 100e9})
    monkeypatch.setattr(roofline, "measure", lambda *args, **options: rates)
    words = ["--config", str(config_file), "--input", "24", "--output", "4", "--concurrency", "2", "--json", "-"]
    done = CliRunner().invoke(app, ["bench", "engine", *words])
    assert done.exit_code == 0, done.output
    measured = json.loads(done.stdout)
    done = CliRunner().invoke(app, ["bench", "floor", *words])
    assert done.exit_code == 0, done.output
    alone = json.loads(done.stdout)
    assert measured["runs"][0]["floor"] == alone["runs"][0]["floor"]
    assert 0 < measured["runs"][0]["output_tokens_s"] < alone["runs"][0]["floor"]["output_tokens_s"]
    assert alone["machine_limits"]["bytes_s"] == 50e9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "1,x"], "--concurrency"),
        (["--model", "other"], "it has tiny"),
        (["--pool", "other"], "it has local"),
        (["--set", "block_size=0"], "engine.block_size"),
    ],
)
def test_mistakes_are_named(config_file: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "engine", "--config", str(config_file), *words])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)


@pytest.mark.parametrize(("text", "message"), [("[]", "no report"), ("{", "not JSON"), ('{"runs": 1}', "no report")])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        report.read(path)
    with pytest.raises(BenchError, match="cannot be read"):
        report.read(tmp_path / "none.json")
