"""The native kernel in every cell of the matrix, in fp32 token by token; in bf16 close; and blind to its company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.model import oracle
from tests.workers.model.harness import GREEDY, Bench, logits_of
from tests.workers.model.matrix import COMBINATIONS, Cell, Models, model_of
from tests.workers.model.oracle import Case
from workers.config import EngineConfig
from workers.model.loading import LoadedModel, load
from workers.model_store import ModelFiles
from workers.protocol import Generate, SamplingParams

LENGTHS = (20, 30, 32, 44, 48, 63, 64, 70)
"""Around the borders of blocks of 16: some on one, most cross one while they answer."""
PROMPTS, FULL_PROMPTS, NEW_TOKENS = 20, 8, 20


def _cell(together: bool, chunk: int, cache: str, tight: bool) -> Cell:
    """In a tight pool everybody must outgrow the spare block that admission leaves: more than a block of answer."""
    return Cell(together, chunk, cache, tight, 16, NEW_TOKENS if together and tight else 6)


CELLS = [_cell(*combination) for combination in COMBINATIONS]


@pytest.fixture(scope="module")
def cut_cases(smollm2_cut: Path) -> list[Case]:
    prompts = oracle.prompts(smollm2_cut / "tokenizer.json", 4096, PROMPTS, LENGTHS)
    cases = oracle.greedy(smollm2_cut, prompts, NEW_TOKENS)
    assert sum(len(case.expected) for case in cases) >= 0.9 * PROMPTS * NEW_TOKENS
    return cases


@pytest.fixture(scope="module")
def full_cases(smollm2: ModelFiles) -> list[Case]:
    prompts = oracle.prompts(smollm2.dir / "tokenizer.json", 49152, FULL_PROMPTS, (30, 32))
    return oracle.greedy(smollm2.dir, prompts, NEW_TOKENS)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_on_cut_weights(cell: Cell, smollm2_cut: Path, cut_cases: list[Case], models: Models) -> None:
    """Mixed with all prompts, alone with one of each length."""
    cell.run(
        cut_cases if cell.together else cut_cases[: len(LENGTHS)],
        model_of(models, smollm2_cut, cell.engine("native")),
        "native",
    )


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        (_cell(True, 7, "prefix", True), FULL_PROMPTS),
        (_cell(True, 16, "cold", False), 4),
        (_cell(False, 64, "repeat", False), 4),
    ],
    ids=str,
)
def test_cells_on_the_full_model(
    cell: Cell, count: int, smollm2: ModelFiles, full_cases: list[Case], models: Models
) -> None:
    cell.run(full_cases[:count], model_of(models, smollm2.dir, cell.engine("native")), "native")


@pytest.fixture(scope="module")
def bf16(smollm2: ModelFiles) -> LoadedModel:
    return load(smollm2, EngineConfig(device="cpu", dtype="bfloat16", attention="native", blocks=64, threads=2))


def test_bf16_logits_are_close(bf16: LoadedModel, smollm2: ModelFiles, full_cases: list[Case]) -> None:
    """Of every row of prompt and answer: relative error, and the same choice wherever fp32 is clear about it."""
    model = AutoModelForCausalLM.from_pretrained(smollm2.dir, dtype=torch.float32).eval()
    for case in full_cases[:4]:
        tokens = [*case.prompt, *case.expected]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([tokens])).logits[0]
        found = logits_of(bf16, tokens, [len(tokens)], list(range(9, 16)))
        assert (found - expected).norm() / expected.norm() <= 2e-2
        best = expected.topk(2).values
        differs = found.argmax(-1) != expected.argmax(-1)
        assert (best[differs, 0] - best[differs, 1] < 0.1).all()


def test_bf16_diverges_only_where_fp32_hesitates(bf16: LoadedModel, full_cases: list[Case]) -> None:
    """Generated under the engine, all at once: the first token that differs had a rival within 0.1."""
    engine = EngineConfig(device="cpu", dtype="bfloat16", attention="native", blocks=64, threads=2)
    bench = Bench("", engine, bf16)
    found = bench.run([Generate(str(i), case.prompt, NEW_TOKENS, GREEDY) for i, case in enumerate(full_cases)])
    same = 0
    for finished, case in zip(found, full_cases, strict=True):
        pairs = zip(finished.tokens, case.expected, strict=False)
        first = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert first is None or case.margins[first] < 0.1
        same += first is None
    assert same >= len(full_cases) // 2


SAMPLED: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True, "logprobs": 3}
KINDS = [
    SamplingParams(seed=5, **SAMPLED),
    SamplingParams(seed=6, top_p=0.8, **SAMPLED),
    SamplingParams(seed=7, top_k=20, min_p=0.02, **SAMPLED),
    SamplingParams(seed=8, presence_penalty=0.5, frequency_penalty=0.5, **SAMPLED),
    GREEDY,
]


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_outputs_and_seeded_samples_do_not_depend_on_the_batch(
    attention: str, smollm2_cut: Path, cut_cases: list[Case], models: Models
) -> None:
    """engine H5: alone in a roomy pool, and among others in a tight one with other chunks: the same tokens.

    The kernel's log probabilities are the same to the last bit; torch's matrix products depend on the row count.
    """
    roomy = Cell(True, 64, "cold", False, 16, 20).engine(attention)
    model = model_of(models, smollm2_cut, roomy)
    requests = [Generate(f"{i}", cut_cases[i].prompt, 20, kind, scope=b"%d" % i) for i, kind in enumerate(KINDS)]
    alone = Bench("", roomy, model)
    single = [alone.run([request])[0] for request in requests]
    mixed = []
    for index, (case, request) in enumerate(zip(cut_cases[8:13], requests, strict=True)):
        mixed += [Generate(f"other {index}", case.prompt, 20, GREEDY), request]
    tight = Bench("", roomy.model_copy(update={"blocks": 11, "max_chunk_tokens": 5}), model)
    tight.run(mixed, stagger=1)
    assert tight.preemptions > 0
    assert tight.noted.widest >= 3
    for request, kept in zip(requests, single, strict=True):
        found = tight.done[request.id, 0]
        assert found.tokens == kept.tokens
        if attention == "native":
            assert found.logprobs == kept.logprobs
        else:
            assert found.logprobs == pytest.approx(kept.logprobs, abs=1e-4)
