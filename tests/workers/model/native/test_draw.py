"""What the kernel draws is what the sampler draws, seed by seed; and what it leaves to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.model import tiny
from workers.config import EngineConfig
from workers.engine.plan import Chunk, SequenceFault, StepPlan
from workers.engine.sequence import Sequence
from workers.model.loading import LoadedModel, load
from workers.model.native import runner as native
from workers.model.native.runner import NativeRunner
from workers.protocol import SamplingParams

ROWS, ROUNDS = 48, 4
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-40},
    {"temperature": 40.0},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 9.0, "top_k": 150},
    {"temperature": 0.9, "top_k": 10**12},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.3},
    {"temperature": 12.0, "top_p": 0.97},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 20.0, "top_k": 200, "top_p": 0.9},
]


@pytest.fixture(scope="module", params=[300, 5003])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Vocabularies that end within a piece and within the kernel's padding, at once and after many."""
    made = tiny.model(hidden_size=64, head_dim=16, vocab_size=request.param)
    folder = tiny.write_directory(made, tmp_path_factory.mktemp("draw"))
    return load(folder, EngineConfig(blocks=64, device="cpu", attention="native", dtype="float32", threads=2))


def tokens(loaded: LoadedModel, params: SamplingParams, rounds: int = ROUNDS) -> list[list[int]]:
    """What ``ROWS`` sequences with different prompts and seeds get, round by round."""
    found = []
    for number in range(rounds):
        chunks = []
        for row in range(ROWS):
            one = Sequence(f"s{row}", 0, [5 + row, 9, 60 + row], 3, 8, params, blocks=[row], seed=ROWS * number + row)
            chunks.append(Chunk(one, 0, 3, (one,)))
        found.append([one.tokens[0] for one in loaded.runner.run(StepPlan(1, chunks)).sampled])
    return found


def leave_all(rows: int, samplers: list[Sequence], own: list[int]) -> tuple[set[int], None]:
    return set(), None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_token_for_every_seed(
    loaded: LoadedModel, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cut, cold and hot, alone and together: none of these draws is the sampler's."""
    params = SamplingParams(**kind)
    asked: list[int] = []
    monkeypatch.setattr(native, "sample", lambda logits, samplers: asked.append(len(samplers)))
    drawn = tokens(loaded, params)
    assert not asked
    monkeypatch.undo()
    monkeypatch.setattr(native, "_choices", leave_all)
    assert tokens(loaded, params) == drawn
    assert len({token for row in drawn for token in row}) > 1


@pytest.mark.parametrize(
    "kind",
    [
        {"logprobs": 1},
        {"logit_bias": {7: 1.0}},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"typical_p": 0.9},
        {"bad_words": ((4, 5),)},
        {"min_tokens": 3},
    ],
    ids=str,
)
def test_what_needs_more_than_a_draw_is_the_samplers(
    loaded: LoadedModel, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these changes logits, or tells of them."""
    asked: list[int] = []
    real = native.sample

    def noted(logits: torch.Tensor, samplers: list[Sequence]) -> Any:
        asked.append(len(samplers))
        return real(logits, samplers)

    monkeypatch.setattr(native, "sample", noted)
    tokens(loaded, SamplingParams(**{"temperature": 0.8, **kind}), rounds=1)
    assert asked == [ROWS]


def test_choices_of_one_row_are_the_samplers(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """n > 1 share the prompt's last row, each with its own seed; a plain one beside them is the kernel's."""
    asked: list[int] = []
    real = native.sample

    def noted(logits: torch.Tensor, samplers: list[Sequence]) -> Any:
        asked.append(len(samplers))
        return real(logits, samplers)

    monkeypatch.setattr(native, "sample", noted)
    params = SamplingParams(temperature=0.9)
    lines = [Sequence("n", index, [5, 9, 60], 3, 8, params, blocks=[0], seed=index) for index in range(3)]
    plain = Sequence("s", 0, [6, 9, 61], 3, 8, params, blocks=[1], seed=1)
    chunks = [Chunk(lines[0], 0, 3, tuple(lines)), Chunk(plain, 0, 3, (plain,))]
    sampled = loaded.runner.run(StepPlan(1, chunks)).sampled
    assert asked == [3]
    monkeypatch.setattr(native, "_choices", leave_all)
    assert loaded.runner.run(StepPlan(1, chunks)).sampled == sampled


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_the_samplers(tmp_path: Path, value: float) -> None:
    """One odd logit counts as the sampler says; a row of them is the model's fault and ends its sequence."""
    made = tiny.model(hidden_size=64, head_dim=16, tie_word_embeddings=False)
    with torch.no_grad():
        made.lm_head.weight[17, 0] = value
    folder = tiny.write_directory(made, tmp_path / "one")
    model = load(folder, EngineConfig(blocks=64, device="cpu", attention="native", dtype="float32", threads=1))
    assert isinstance(model.runner, NativeRunner)
    found = tokens(model, SamplingParams(temperature=0.8), rounds=2)
    assert all(0 <= token < 300 for row in found for token in row)
    with torch.no_grad():
        made.lm_head.weight[:, 0] = float("nan")
    folder = tiny.write_directory(made, tmp_path / "all")
    model = load(folder, EngineConfig(blocks=64, device="cpu", attention="native", dtype="float32", threads=1))
    with pytest.raises(SequenceFault):
        tokens(model, SamplingParams(temperature=0.8), rounds=1)
