"""Beam search over real models: the same answers as transformers' in fp32, on every CPU path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.workers.model import tiny
from tests.workers.model.harness import Bench
from tests.workers.model.places import places
from workers.config import EngineConfig
from workers.protocol import Beams, Generate, SamplingParams

ENDS = [2, 7, 40, 41, 42, 43, 90, 91, 200, 201]
"""Several end tokens, so that some of the answers of a random model end."""
NEW = 14


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.write_directory(
        tiny.model(5, hidden_size=64, intermediate_size=96, head_dim=16), tmp_path_factory.mktemp("beams")
    )
    tiny.edit_json(folder / "generation_config.json", eos_token_id=ENDS)
    return folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (1, 8, 21)]


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def oracle(model: PreTrainedModel, prompt: list[int], beams: Beams, n: int, ends: list[int] | None) -> list[list[int]]:
    model.generation_config.eos_token_id = ends
    tokens = torch.tensor([prompt])
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        num_beams=beams.width,
        num_return_sequences=n,
        do_sample=False,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        pad_token_id=0,
    )
    lines = found[:, len(prompt) :].tolist()
    return [line[: next((i + 1 for i, token in enumerate(line) if ends and token in ends), NEW)] for line in lines]


@pytest.mark.parametrize(("attention", "device"), places("native", "batched", "reference"))
def test_answers_are_transformers(attention: str, device: str, directory: Path, model: PreTrainedModel) -> None:
    engine = EngineConfig(
        device=device,
        dtype="float32",
        attention=attention,
        block_size=16,
        blocks=24,
        max_step_tokens=24,
        max_running=64,
    )
    bench = Bench(directory, engine)
    cases: dict[str, tuple[list[int], Beams, int, list[int] | None]] = {}
    for number, prompt in enumerate(prompts()):
        for width, penalty, early in ((4, 1.0, False), (3, 0.0, True), (5, -0.7, "never"), (2, 2.0, "never")):
            for ends in (ENDS, None):
                beams = Beams(width, penalty, early)
                cases[f"{number} {width} {bool(ends)}"] = (prompt, beams, min(width, 3), ends)
    bench.run(
        Generate(
            name, prompt, NEW, SamplingParams(temperature=0.0, ignore_eos=ends is None), n=n, beams=beams, scope=b"s"
        )
        for name, (prompt, beams, n, ends) in cases.items()
    )
    kinds = set()
    for name, (prompt, beams, n, ends) in cases.items():
        expected = oracle(model, prompt, beams, n, ends)
        assert [bench.done[name, index].tokens for index in range(n)] == expected, name
        kinds |= {bench.done[name, index].last.finish for index in range(n)}  # type: ignore[union-attr]
    assert kinds == {"stop", "length"}
    pool = bench.engine.planner.pool
    assert pool.used == 0
    assert bench.preemptions > 0, "the pool is small: searches started over, too"
