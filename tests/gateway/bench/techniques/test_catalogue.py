"""Each technique's row comes of real engines, and a switch that did nothing shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gateway.bench.report import BenchError, Report
from gateway.bench.techniques import catalogue
from gateway.bench.techniques.lab import Found
from gateway.cli.commands import app
from tests.gateway.harness import AUTH
from tests.workers.model import tiny
from workers.engine.tier_rates import Rates
from workers.model import specimen

SMALL = ("--input", "24", "--output", "4", "--long", "96", "--rounds", "1")


def rows(config: Path, folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """What ``bench techniques`` reports, by technique."""
    out = folder / "out.json"
    result = CliRunner().invoke(
        app, ["bench", "techniques", "--config", str(config), *SMALL, *arguments, "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    return {run["technique"]: run for run in json.loads(out.read_text())["runs"]}


def test_rows_that_one_load_shows(config_file: Path, tmp_path: Path) -> None:
    """Bytes kept, hits, guesses, adapters: each with the counter that only moves when it works."""
    only = ("kv_dtype int8", "weight_dtype int8, 1", "prefix_cache", "speculation ngram, copying", "adapters, 8")
    arguments = [word for name in only for word in ("--only", name)]
    found = rows(config_file, tmp_path, *arguments, "--input", "64", "--output", "24")
    assert len(found) == 6, "and int8 over long contexts"
    assert found["kv_dtype int8"]["proof"]["tokens in the same bytes"].endswith("×")
    assert found["kv_dtype int8"]["worked"]
    assert found["prefix_cache"]["proof"]["cached tokens"] > 0
    assert found["prefix_cache"]["proof"]["equal answers"] == "4 of 4"
    assert found["speculation ngram, copying"]["proof"]["equal answers"] == "4 of 4"
    adapters = found["adapters, 8 among 8 running"]
    assert adapters["proof"]["tokens with an adapter"] >= 8 * 24
    assert adapters["worked"]
    for run in found.values():
        assert run["rounds"] == 1
        assert run["ratio_low"] <= run["ratio"] <= run["ratio_high"]
        assert run["off"] > 0 < run["on"]


def test_a_draft_model_is_made_where_none_is_named(config_file: Path, model_dir: Path, tmp_path: Path) -> None:
    """The model's own first layers: what guesses cost that are hardly ever right. A named one is taken."""
    cut = "questions, guessed by its own first 1 layers"
    for named, about in (((), cut), (("--draft", str(model_dir)), "questions")):
        [run] = rows(config_file, tmp_path, "--only", "speculation draft", "--output", "16", *named).values()
        assert run["load"] == f"{about}, 1 running"
        assert run["worked"]
        assert run["proof"]["equal answers"] == "4 of 4"


def test_rows_of_the_tiers(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that was evicted for real is brought back; preempted sequences are swapped; answers stay the same.

    Whether that pays for so small a model is a matter of the clock: here it always does.
    """
    monkeypatch.setattr(Rates, "pays", lambda *_, **__: True)
    found = rows(config_file, tmp_path, "--only", "tiers", "--only", "preemption by swap", "--output", "40")
    assert set(found) == {"tiers, host", "tiers, disk", "preemption by swap"}
    for name in ("tiers, host", "tiers, disk"):
        assert found[name]["proof"]["restored blocks"] > 0
        assert found[name]["proof"]["of them found"].startswith("160 of")
        assert found[name]["proof"]["equal answers"] == "2 of 2"
    swap = found["preemption by swap"]
    assert swap["proof"]["equal answers"] == "16 of 16"
    assert swap["proof"]["swapped out"] > 0


def test_a_model_with_windows_holds_less(model_dir: Path, tmp_path: Path) -> None:
    """Both sides are run: the model as it is, and with a window that no context exceeds."""
    source = tmp_path / "windowed"
    source.mkdir()
    for path in model_dir.iterdir():
        (source / path.name).symlink_to(path)
    (source / "config.json").unlink()
    fields = json.loads((model_dir / "config.json").read_text())
    fields |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (source / "config.json").write_text(json.dumps(fields))
    config = tmp_path / "windows.yaml"
    models = [{"name": "w", "source": str(source), "pools": [{"name": "p", "engine": {"threads": 1}}]}]
    config.write_text(json.dumps({"policies": {"auth": AUTH}, "tenants": [{"id": "a"}], "models": models}))
    run = rows(config, tmp_path, "--only", "sliding windows")["sliding windows"]
    assert run["ratio"] < 0.5
    assert run["proof"]["windows"] == "64"


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_bf16"), reason="weights are not folded elsewhere")
def test_folded_weights_answer_the_same(tmp_path: Path) -> None:
    """Other forms of weights are held against plain ones as well."""
    source = tiny.write_directory(tiny.model(4, hidden_size=64, head_dim=16, intermediate_size=64), tmp_path / "m")
    engine = {"dtype": "bfloat16", "blocks": 64, "threads": 1}
    models = [{"name": "m", "source": str(source), "pools": [{"name": "p", "engine": engine}]}]
    config = tmp_path / "folded.yaml"
    config.write_text(json.dumps({"policies": {"auth": AUTH}, "tenants": [{"id": "a"}], "models": models}))
    found = rows(config, tmp_path, "--only", "fold_weights, 1", "--only", "weight_dtype int8, 1")
    folded = found["fold_weights, 1 running"]
    assert folded["worked"]
    assert folded["proof"]["equal answers"] == "2 of 2"
    plain = folded["proof"]["weights"].split(" to ")[0]
    assert found["weight_dtype int8, 1 running"]["proof"]["weights"].startswith(f"{plain} to ")


@pytest.mark.long
def test_rows_of_several_processes(config_file: Path, tmp_path: Path) -> None:
    """Two ranks that compute what one computes; a prefill worker that hands prompts over."""
    found = rows(
        config_file, tmp_path, "--only", "tensor_parallel", "--only", "expert", "--only", "role", "--seconds", "3",
        "--long", "600",
    )  # fmt: skip
    for name in ("tensor_parallel 2", "expert_parallel"):
        assert found[name]["proof"]["ranks alive"] == 2
        assert found[name]["proof"]["equal answers"] == "8 of 8"
    roles = found["role prefill and decode"]
    assert roles["proof"]["prompts handed over"] > 0
    assert roles["proof"]["failed"] == "0 off, 0 on"


def test_what_is_missing_is_told(config_file: Path) -> None:
    """With the reason below the table, and the other rows are measured."""
    arguments = (
        "--set",
        "kv_cache_reuse=false",
        "--only",
        "speculation ngram, other",
        "--only",
        "weight_dtype gguf, 1",
    )
    result = CliRunner().invoke(app, ["bench", "techniques", "--config", str(config_file), *SMALL, *arguments])
    assert result.exit_code == 0, result.output
    assert "speculation ngram, other: not measured: engine" in result.stdout
    assert "kv_cache_reuse" in result.stdout
    assert "weight_dtype gguf, 1 running: not measured:" in result.stdout


def test_a_name_that_none_begins_with_is_told() -> None:
    with pytest.raises(BenchError, match=r"'magic' is no technique.*kv_dtype int8"):
        catalogue.pick(["magic"])
    assert list(catalogue.pick(["weight_dtype int4"])) == [
        "weight_dtype int4, 1 running",
        "weight_dtype int4, 32 running",
    ]


def test_figures_are_medians_of_pairs() -> None:
    """The ratio is the median of the rounds' ratios, not the ratio of medians."""
    found = Found("l", "u", [(10.0, 20.0), (20.0, 10.0), (40.0, 60.0)], {"k": 1}, worked=False)
    figures = found.figures()
    assert (figures["off"], figures["on"]) == (20.0, 20.0)
    assert (figures["ratio"], figures["ratio_low"], figures["ratio_high"]) == (1.5, 0.5, 2.0)
    report = Report("techniques", {}, {}, [{"technique": "t", **figures}])
    assert "t: did nothing on this load" in catalogue.table(report).notes


def test_made_models_go_by_two() -> None:
    """Whatever is divided: heads, key heads, layers, experts."""
    parts = (specimen.HEADS, specimen.KV_HEADS, specimen.LAYERS // 2, specimen.EXPERTS, specimen.INNER)
    assert all(number % 2 == 0 for number in parts)
