"""A model on several ranks gives what it gives on one: logits, tokens, saved blocks. Ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench
from workers.config import EngineConfig
from workers.engine.plan import RunnerGoneError, StepPlan
from workers.model import budget
from workers.model.draft import DraftRunner
from workers.model.loading import LoadedModel, load
from workers.model.parallel import spread
from workers.model.parallel.spread import SpreadRunner
from workers.model.runner import TorchRunner
from workers.protocol import Generate, SamplingParams

pytestmark = pytest.mark.usefixtures("ranks_as_threads")
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_experts": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama-odd-vocabulary": ("llama", {"vocab_size": 301}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_key_value_heads": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2-moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 24}),
    "qwen3-moe-some-dense": ("qwen3_moe", {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
}
WAYS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "pp3": {"pipeline_parallel": 3},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"tensor_parallel": 2, "expert_parallel": True},
    "ep2-pp2": {"tensor_parallel": 2, "expert_parallel": True, "pipeline_parallel": 2},
}
CASES = [
    *((family, "tp2") for family in FAMILIES),
    *((family, "ep2") for family, (kind, _) in FAMILIES.items() if kind in ("mixtral", "qwen2_moe", "qwen3_moe")),
    *(("llama-odd-vocabulary", way) for way in ("pp2", "pp3", "tp2-pp2")),
    *(("qwen3-moe-some-dense", way) for way in ("pp3", "ep2-pp2")),
]
TOKENS = [(7 * index * index + 3 * index) % 290 for index in range(70)]
ENGINE = EngineConfig(device="cpu", dtype="float32", attention="batched", blocks=10, max_chunk_tokens=16, threads=1)
CROWD = [
    *(Generate(f"g{index}", TOKENS[: 33 + index], 24, GREEDY) for index in range(4)),
    Generate("sampled", TOKENS[9:20], 24, SamplingParams(temperature=1.0, seed=5, ignore_eos=True), n=2),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def look_up(name: str) -> Path:
        if name not in made:
            family, changes = FAMILIES[name]
            model = tiny.model(3, family, num_hidden_layers=3, **changes)
            made[name] = tiny.write_directory(model, tmp_path_factory.mktemp("model") / "m")
        return made[name]

    return look_up


@pytest.fixture(scope="module")
def alone(source: Callable[[str], Path]) -> Callable[[str], Bench]:
    """The crowd on one device, computed once for each model."""
    known: dict[str, Bench] = {}

    def look_up(name: str) -> Bench:
        if name not in known:
            known[name] = Bench(source(name), ENGINE)
            known[name].run(CROWD, stagger=1)
        return known[name]

    return look_up


@pytest.mark.parametrize(("family", "way"), CASES, ids=["-".join(case) for case in CASES])
def test_tokens_are_those_of_one_device(
    family: str, way: str, source: Callable[[str], Path], alone: Callable[[str], Bench]
) -> None:
    """engine I3: greedy and sampled, in chunks, with prefix hits, copies and preemptions; log probabilities close."""
    spread = Bench(source(family), ENGINE.model_copy(update={**WAYS, **EXPERTS}[way]))
    spread.run(CROWD, stagger=1)
    expected = alone(family)
    assert set(spread.done) == set(expected.done)
    for key, one in spread.done.items():
        assert one.tokens == expected.done[key].tokens
        assert one.logprobs == pytest.approx(expected.done[key].logprobs, abs=1e-4)
        assert one.last is not None
        assert one.last.finish == "length"
    assert spread.preemptions == expected.preemptions > 0
    assert sum(one.last.prompt_cached for one in spread.done.values() if one.last is not None) > 0
    assert isinstance(spread.model.runner, SpreadRunner)
    assert spread.model.ranks is not None
    assert spread.model.ranks.alive == spread.model.attention.count("ranks") * _ranks(way)
    spread.model.ranks.close()


def test_two_hundred_sampled_requests_neither_diverge_nor_hang(source: Callable[[str], Path]) -> None:
    """engine I3: two ranks, temperature 1. Only rank 0 draws, and what it drew is what all compute with next."""
    engine = ENGINE.model_copy(update={"blocks": 160, "max_running": 32})
    hot = SamplingParams(temperature=1.0, ignore_eos=True)
    many = [
        Generate(f"r{index}", TOKENS[index % 50 : index % 50 + 6 + index % 7], 6, hot, scope=b"%d" % (index % 3))
        for index in range(200)
    ]
    told = {}
    for name, way in (("one", {}), ("two", WAYS["tp2"])):
        bench = Bench(source("llama-odd-vocabulary"), engine.model_copy(update=way))
        told[name] = [one.tokens for one in bench.run(many)]
        if bench.model.ranks is not None:
            assert bench.model.ranks.alive == 2
            bench.model.ranks.close()
    assert told["two"] == told["one"]
    assert len({tuple(tokens) for tokens in told["one"]}) > 150, "they are drawn"


@pytest.mark.parametrize("way", ["tp2", "pp2"])
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_guesses_are_made_by_one_rank_and_checked_by_all(
    method: str, way: str, source: Callable[[str], Path], alone: Callable[[str], Bench]
) -> None:
    """engine E5, I5: the tokens of one device, although rank 0 alone knows which rows are guesses."""
    speculation = {"method": method, "tokens": 3, "ngram_min": 1}
    if method == "draft":
        speculation = {"method": method, "tokens": 3, "draft_model": str(source("qwen3"))}
    changes = {"blocks": 40, "speculation": speculation, **WAYS[way]}
    spread = Bench(source("qwen3"), EngineConfig.model_validate({**ENGINE.model_dump(mode="json"), **changes}))
    spread.engine._clock = lambda: 0  # rows cost nothing: guesses are always worth it
    if isinstance(spread.model.runner, DraftRunner):
        spread.model.runner._clock = lambda: 0
    spread.run(CROWD, stagger=1)
    expected = alone("qwen3")
    assert {key: one.tokens for key, one in spread.done.items()} == {
        key: one.tokens for key, one in expected.done.items()
    }
    assert spread.engine.planner.stats().drafts_accepted > 0
    assert spread.model.ranks is not None
    spread.model.ranks.close()


def _ranks(way: str) -> int:
    changes = {**WAYS, **EXPERTS}[way]
    return int(changes.get("tensor_parallel", 1) * changes.get("pipeline_parallel", 1))


def bytes_of(model: LoadedModel, blocks: list[int]) -> torch.Tensor:
    assert isinstance(model.runner, TorchRunner)
    with torch.inference_mode():
        return model.runner.cache.save(blocks)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_zeroed_saved_and_restored_on_every_rank(way: str, source: Callable[[str], Path]) -> None:
    bench = Bench(source("qwen3"), ENGINE.model_copy(update=WAYS[way]))
    bench.run([Generate("a", TOKENS[:40], 2, GREEDY)])
    model, whole = bench.model, load(source("qwen3"), ENGINE)
    assert isinstance(model.runner, SpreadRunner)
    assert isinstance(whole.runner, TorchRunner)
    cache = model.runner.cache
    assert (cache.block_bytes, cache.bytes_per_token) == (whole.runner.cache.block_bytes, whole.kv_bytes_per_token)
    assert model.kv_bytes_per_token == whole.kv_bytes_per_token
    blocks = [block for block in range(10) if bytes_of(model, [block]).any()]
    assert len(blocks) == 3
    saved = bytes_of(model, blocks)
    again = Bench("", ENGINE, whole)
    again.run([Generate("a", TOKENS[:40], 2, GREEDY)])
    undivided = bytes_of(whole, blocks)
    assert torch.allclose(saved.view(torch.float32), undivided.view(torch.float32), atol=1e-4)
    assert undivided.view(torch.float32).std() > 0.1
    model.runner.zero_blocks(blocks)
    assert not bytes_of(model, list(range(10))).any()
    with torch.inference_mode():
        cache.restore(blocks, saved)
        assert torch.equal(bytes_of(model, blocks), saved)
        model.runner.run(StepPlan(0, copies=[(blocks[0], blocks[1])], zero=[blocks[2]]))
        assert torch.equal(bytes_of(model, blocks[:2]), saved[[0, 0]])
        assert not bytes_of(model, blocks[2:]).any()
        assert bytes_of(model, []).shape == (0, cache.block_bytes)
        cache.restore([], torch.empty(0, cache.block_bytes, dtype=torch.uint8))
        with pytest.raises(ValueError, match="saved blocks are"):
            cache.restore(blocks, saved[:, 1:])
    assert model.ranks is not None
    model.ranks.close()


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_that_of_all_ranks_together(way: str, source: Callable[[str], Path]) -> None:
    """``kv_cache`` buys as many blocks as on one device; weights count once, but for what every rank needs."""
    engine = ENGINE.model_copy(update={"blocks": None, "kv_cache": 10**6})
    whole = load(source("llama-odd-vocabulary"), engine)
    spread = load(source("llama-odd-vocabulary"), engine.model_copy(update=WAYS[way]))
    width, stages = (WAYS[way].get(name, 1) for name in ("tensor_parallel", "pipeline_parallel"))
    assert spread.blocks == whole.blocks
    assert spread.budget.kv == whole.budget.kv
    assert 0 <= spread.budget.weights - spread.weight_bytes <= 4 * 32 * width * (stages - 1)  # final norms
    table, norms = 4 * 32 * -(-301 // width) * width, 4 * 3 * 2 * 32
    again = (table - 4 * 32 * 301) + (width - 1) * (norms + 4 * 32) + (table if stages > 1 else 0)
    assert spread.weight_bytes == whole.weight_bytes + again
    assert budget.weight_bytes(whole.config, 4) == whole.weight_bytes
    assert spread.ranks is not None
    spread.ranks.close()


def test_a_model_that_does_not_divide_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.model.parallel.ranks.spawn", lambda *_: pytest.fail("a rank was started"))
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    folder = tiny.write_directory(tiny.model(1, hidden_size=72, **heads), tmp_path / "m")
    with pytest.raises(ValueError, match=r"tensor_parallel=2 does not divide the model's num_attention_heads=9"):
        load(folder, ENGINE.model_copy(update=WAYS["tp2"]))


def second_stage_broken(tmp_path: Path) -> Path:
    """A model whose last layer lacks a matrix."""
    from safetensors.torch import load_file, save_file

    folder = tiny.write_directory(tiny.model(1), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_what_one_rank_lacks_is_said_and_ends_all(tmp_path: Path) -> None:
    """Only the second stage's weights are broken: rank 0 loads and hears why the other does not."""
    with pytest.raises(ValueError, match=r"rank 1 .*the weights lack 'model\.layers\.0\.mlp\.down_proj\.weight'"):
        load(second_stage_broken(tmp_path), ENGINE.model_copy(update=WAYS["pp2"]))


def test_a_rank_that_leaves_while_others_still_join_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine rank 0 may find the connection closed before it has joined: it asks who left, and why."""

    def late(*given: Any) -> None:
        real(*given)
        raise RunnerGoneError("joining: another rank ended or did not answer in time")

    real = spread.Group
    monkeypatch.setattr(spread, "Group", late)
    with pytest.raises(ValueError, match=r"rank 1 .*the weights lack"):
        load(second_stage_broken(tmp_path), ENGINE.model_copy(update=WAYS["pp2"]))


def test_the_kernel_is_for_one_device() -> None:
    with pytest.raises(ValueError, match="attention=native and pipeline_parallel=2 exclude each other"):
        EngineConfig(attention="native", pipeline_parallel=2)
    with pytest.raises(ValueError, match="expert_parallel=true divides experts among the devices of tensor_parallel"):
        EngineConfig(expert_parallel=True, pipeline_parallel=2)
