"""Who has what: every number of a model is on exactly the ranks that need it, and what does not divide is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.model import tiny
from workers.config import EngineConfig
from workers.model.config import ModelConfig, MoeConfig, RopeConfig
from workers.model.parallel.shards import ShardSource
from workers.model.parallel.split import Split, SplitError, span

DENSE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab=301,
    hidden=32,
    intermediate=48,
    layers=5,
    heads=4,
    kv_heads=2,
    head_dim=8,
    max_context=64,
    rms_eps=1e-5,
    rope=RopeConfig(),
    tied=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
MIXED = replace(
    DENSE,
    architecture="Qwen2MoeForCausalLM",
    tied=True,
    mlp_bias=False,
    output_bias=False,
    moe=MoeConfig(4, 2, 24, False, 16, frozenset({1})),
)
WHOLE: dict[str, tuple[ModelConfig, str, dict[str, Any]]] = {
    "dense": (DENSE, "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mixed": (
        MIXED,
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [1],
        },
    ),
}


class Memory:
    """A source in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def stored(family: str, changes: dict[str, Any], tmp_path: Any) -> dict[str, Tensor]:
    """A random model as its directory holds it."""
    from safetensors.torch import load_file

    made = tiny.model(1, family, vocab_size=301, num_hidden_layers=5, **changes)
    return load_file(tiny.write_directory(made, tmp_path / "m") / "model.safetensors")


def splits(config: ModelConfig, engine: EngineConfig) -> Iterator[Split]:
    for rank in range(engine.ranks):
        yield Split.of(config, engine, rank)


@pytest.mark.parametrize("which", WHOLE)
@pytest.mark.parametrize(
    ("width", "stages", "experts"), [(2, 1, False), (1, 2, False), (1, 5, False), (2, 3, False), (2, 2, True)]
)
def test_the_parts_make_the_whole(which: str, width: int, stages: int, experts: bool, tmp_path: Any) -> None:
    """Every tensor is whole on each rank that has it uncut, or comes together from the lanes of one stage."""
    config, family, changes = WHOLE[which]
    if experts and config.moe is None:
        with pytest.raises(SplitError):
            Split.of(config, engine(width, stages, experts), 0)
        return
    tensors = stored(family, changes, tmp_path)
    found: dict[str, dict[int, Tensor]] = {}
    for split in splits(config, engine(width, stages, experts)):
        source = ShardSource(Memory(tensors), split)
        for name in source.names():
            tensor = source.read(name)
            original = split.stored(name)
            assert original is not None
            assert split.named(original) == name
            found.setdefault(original, {})[split.rank] = tensor
    assert set(found) == set(tensors)
    for name, parts in found.items():
        whole = tensors[name]
        if all(part.shape == whole.shape for part in parts.values()):
            others = [part for part in parts.values() if not torch.equal(part, whole)]
            assert len(others) < len(parts)
            assert all(not part.any() for part in others)  # the bias of a sum: one lane adds it
            continue
        for stage in {rank // width for rank in parts}:
            lanes = [parts[rank] for rank in sorted(parts) if rank // width == stage]
            assert len(lanes) == width
            axis = next(axis for axis in range(whole.ndim) if lanes[0].shape[axis] != whole.shape[axis])
            joined = torch.cat(lanes, dim=axis)
            assert torch.equal(joined.narrow(axis, 0, whole.shape[axis]), whole)
            assert not joined.narrow(axis, whole.shape[axis], joined.shape[axis] - whole.shape[axis]).any()


def engine(width: int = 1, stages: int = 1, experts: bool = False) -> EngineConfig:
    return EngineConfig(tensor_parallel=width, pipeline_parallel=stages, expert_parallel=experts)


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        (
            {"heads": 9, "kv_heads": 3, "intermediate": 1536},
            engine(2),
            r"engine\.tensor_parallel=2 does not divide the model's num_attention_heads=9, num_key_value_heads=3; "
            r"this model can be split by 1, 3; or split its layers with engine\.pipeline_parallel",
        ),
        ({"kv_heads": 1}, engine(2), r"num_key_value_heads=1; this model can be split by 1;"),
        ({"intermediate": 49}, engine(2), r"intermediate_size=49"),
        ({}, engine(1, 6), r"engine\.pipeline_parallel=6 is more than the model's 5 layers; write 5 or less"),
        ({}, engine(2, 1, True), r"engine\.expert_parallel=true: LlamaForCausalLM has no experts; leave it out"),
        (
            {"heads": 8, "kv_heads": 8, "moe": MoeConfig(4, 2, 24, False)},
            engine(8, 1, True),
            r"engine\.tensor_parallel=8 is more than the model's 4 experts",
        ),
        ({"moe": MoeConfig(4, 2, 25, False)}, engine(2), r"an expert's intermediate size=25"),
        ({"moe": MoeConfig(4, 2, 24, False, 15)}, engine(2, 1, True), r"shared_expert_intermediate_size=15"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(
    changes: dict[str, Any], asked: EngineConfig, message: str
) -> None:
    with pytest.raises(SplitError, match=message):
        Split.of(replace(DENSE, **changes), asked, 0)


def test_what_need_not_divide_is_not_asked_to() -> None:
    """Whole experts may have any size; a model of experts only has no MLP that counts."""
    moe = replace(DENSE, intermediate=49, moe=MoeConfig(5, 2, 25, False))
    parts = [split.part.moe for split in splits(moe, engine(2, 1, True))]
    assert [part.held for part in parts if part is not None] == [range(2), range(2, 5)]


def test_spans_cover_and_differ_by_one_at_most() -> None:
    for count, parts in ((5, 2), (30, 4), (7, 7), (8, 3)):
        runs = [span(count, index, parts) for index in range(parts)]
        assert [layer for run in runs for layer in run] == list(range(count))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
