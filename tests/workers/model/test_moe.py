"""Mixtral, Qwen2-MoE and Qwen3-MoE on small random weights against transformers: logits, ids, and who computes what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.model import oracle, tiny
from tests.workers.model.harness import GREEDY, Bench, logits_of
from workers.config import EngineConfig
from workers.model import budget
from workers.model.loading import load
from workers.model.moe import Experts
from workers.model.runner import TorchRunner
from workers.protocol import Generate

BASE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_experts_per_tok": 2}
QWEN: dict[str, Any] = {**BASE, "num_experts": 5, "moe_intermediate_size": 40}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**BASE, "num_local_experts": 4, "sliding_window": None}),
    "mixtral-untied-all-experts": (
        "mixtral",
        {**BASE, "num_local_experts": 3, "num_experts_per_tok": 3, "tie_word_embeddings": False},
    ),
    "qwen2-moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 56, "num_experts_per_tok": 3}),
    "qwen2-moe-normalised": (
        "qwen2_moe",
        {**QWEN, "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3-moe": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": ("qwen3_moe", {**QWEN, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3-moe-every-second": ("qwen3_moe", {**QWEN, "decoder_sparse_step": 2, "num_experts_per_tok": 1}),
}
TOKENS = [(7 * index * index + 3 * index) % 290 for index in range(70)]
ENGINE = EngineConfig(device="cpu", dtype="float32", blocks=40, block_size=16, threads=1)


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    family, changes = FAMILIES[request.param]
    model = tiny.model(9, family, **changes)
    return model, tiny.write_directory(model, tmp_path_factory.mktemp("family") / "m")


def test_logits_equal_transformers_on_torch(made: tuple[Any, Path]) -> None:
    """``auto`` finds by itself that the kernel knows no experts."""
    model, folder = made
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.3  # logits that are all alike would prove nothing
    loaded = load(folder, ENGINE)
    assert loaded.attention == "batched"
    assert loaded.fallback is not None
    assert loaded.fallback.endswith("ForCausalLM runs in torch only")
    for splits in ([70], [1, 2, 16, 33, 70]):
        found = logits_of(loaded, TOKENS, splits, [5, 2, 9, 0, 12])
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=2e-4)


def test_greedy_ids_equal_transformers(made: tuple[Any, Path]) -> None:
    """Several prompts at once in a small pool: chunks, mixed steps, copies and recomputes on the way."""
    _, folder = made
    prompts = [TOKENS[start : start + length] for start in (0, 9, 30) for length in (14, 30)]
    cases = oracle.greedy(folder, prompts, 24)
    bench = Bench(folder, ENGINE.model_copy(update={"blocks": 8, "max_chunk_tokens": 16}))
    requests = [Generate(str(index), case.prompt, 24, GREEDY) for index, case in enumerate(cases)]
    assert sum(len(case.expected) for case in cases) >= 100
    for finished, case in zip(bench.run(requests, stagger=1), cases, strict=True):
        assert finished.tokens[: len(case.expected)] == case.expected
    assert bench.preemptions > 0


def test_the_budget_knows_every_weight(made: tuple[Any, Path]) -> None:
    model, folder = made
    loaded = load(folder, ENGINE)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert loaded.weight_bytes == 4 * numbers == budget.weight_bytes(loaded.config, 4)


def test_experts_compute_the_rows_that_chose_them_and_no_others(made: tuple[Any, Path]) -> None:
    """Not every row in every expert: the point of the mixture."""
    loaded = load(made[1], ENGINE)
    moe = loaded.config.moe
    assert moe is not None
    assert isinstance(loaded.runner, TorchRunner)
    decoder = loaded.runner.decoder
    assert isinstance(decoder, torch.nn.Module)
    rows: dict[str, int] = {}
    for name, part in decoder.named_modules():
        if isinstance(part, Experts):
            rows[name] = 0
            for expert in part.experts:
                expert.register_forward_hook(
                    lambda _, inputs, __, name=name: rows.__setitem__(name, rows[name] + len(inputs[0]))
                )
    logits_of(loaded, TOKENS, [70], [5, 2, 9, 0, 12])
    assert len(rows) == loaded.config.layers - len(moe.dense) > 0
    assert set(rows.values()) == {70 * moe.per_token}
