"""How memory is divided before a model is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.model import tiny
from workers import cgroup
from workers.config import EngineConfig
from workers.model import budget
from workers.model.config import ModelConfig, MoeConfig, parse_config, read_config
from workers.model.kv_cache import KvCacheSizeError
from workers.model.loading import load
from workers.model.parallel import part
from workers.model.parallel.split import Split
from workers.model_store import ModelStoreError

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return read_config(tiny.write_directory(tiny.model(0), tmp_path / "m"))


def divide(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, free: int, device: torch.device = CUDA, **engine: Any
) -> budget.Budget:
    monkeypatch.setattr(budget, "free_bytes", lambda device: free)
    return budget.divide(model, EngineConfig.model_validate(engine), device, torch.bfloat16, 256)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_as_the_loader_counts_them(family: str, tmp_path: Path) -> None:
    folder = tiny.write_directory(tiny.model(0, family, **FAMILIES[family]), tmp_path / "m")
    loaded = load(folder, EngineConfig(device="cpu", dtype="float32", attention="batched", blocks=4))
    assert loaded.budget.weights == loaded.weight_bytes
    assert loaded.budget.kv == loaded.cache_tokens * loaded.kv_bytes_per_token
    assert "plan margin" in loaded.table


def test_auto_takes_what_is_left(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    made = divide(model, monkeypatch, GIB, kv_cache="auto", memory_margin=0.1)
    per_block = made.kv // made.blocks
    assert made.margin == GIB // 10
    assert 0 <= made.figures()["left"] < per_block
    assert sum(made.figures().values()) == 2 * GIB, "the parts, and what is left of them, are the whole"
    half = divide(model, monkeypatch, GIB, CPU, kv_cache="auto", memory_margin=0.1)
    assert half.kv < 0.6 * made.kv + budget.CUDA_BUFFERS


def test_what_does_not_fit_is_refused_on_cuda_and_told_on_a_cpu(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KvCacheSizeError, match=r"^engine\.kv_cache=\w+: the plan exceeds .* bytes .*lower it"):
        divide(model, monkeypatch, GIB, kv_cache="1GiB")
    told = divide(model, monkeypatch, GIB, CPU, kv_cache="1GiB")
    assert told.short == told.planned + told.margin - GIB > 0
    assert divide(model, monkeypatch, 2 * GIB, CPU, kv_cache="1GiB").short == 0


def test_recorded_steps_are_in_the_plan(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block tables of the largest, and where FlashInfer may plan 8 MiB for each: 35 of them for 256 rows."""

    def buffers(**engine: Any) -> int:
        return divide(
            model, monkeypatch, 2**36, kv_cache="1MiB", max_step_tokens=256, **{"max_running": 256, **engine}
        ).buffers

    none, tables = buffers(cuda_graphs=False), 256 * (256 // 16) * 8
    assert buffers(attention="batched") == none
    assert buffers(attention="triton") == none + tables
    assert buffers() == buffers(attention="flashinfer") == none + tables + 35 * 8 * 2**20
    assert buffers(max_running=4) < none + tables + 35 * 8 * 2**20


def test_where_no_steps_are_recorded_none_are_in_the_plan(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several devices, and mixtures of experts."""
    monkeypatch.setattr(budget, "free_bytes", lambda device: 2**36)
    engine, none = (EngineConfig(kv_cache="1MiB", cuda_graphs=recorded) for recorded in (True, False))
    split = Split(model, 2, 1, False, 0)
    with_graphs, without = (
        part.plan(split, one, CUDA, torch.bfloat16, 256, budget.Beside()).buffers for one in (engine, none)
    )
    assert with_graphs == without
    routed = replace(model, moe=MoeConfig(4, 2, 32, normalise=True))
    with_graphs, without = (budget.divide(routed, one, CUDA, torch.bfloat16, 256).buffers for one in (engine, none))
    assert with_graphs == without


def test_auto_without_room_names_what_is_left(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvCacheSizeError, match=r"engine\.kv_cache=auto: -?[\d,]+ bytes are left"):
        divide(model, monkeypatch, 1000, kv_cache="auto")


def test_free_memory_is_real() -> None:
    assert 2**20 < budget.free_bytes(CPU) < 2**50


def test_a_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory", lambda: 2**20)
    assert budget.free_bytes(CPU) == 2**20


def test_auto_loads_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda device: 256 * 2**20)
    folder = tiny.write_directory(tiny.model(0), tmp_path / "m")
    loaded = load(folder, EngineConfig(device="cpu", dtype="float32", attention="batched", kv_cache="auto"))
    assert loaded.blocks == loaded.budget.blocks > 2
    assert loaded.budget.short == 0


@pytest.mark.parametrize("value", ["automatic", "-1", 0, True, "1 GB/s"])
def test_wrong_sizes_are_named(value: Any) -> None:
    with pytest.raises(ValueError, match="kv_cache"):
        EngineConfig.model_validate({"kv_cache": value})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg"),
        ({"state_size": 16}, "state_size"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers of type mamba"),
    ],
)
def test_models_with_other_state_are_refused_at_start(changes: dict[str, Any], why: str) -> None:
    fields = {**tiny.config().to_dict(), "architectures": ["LlamaForCausalLM"], **changes}
    with pytest.raises(ModelStoreError, match=rf"keeps state other than keys and values \({why}\)"):
        parse_config(fields, {}, "config.json")
