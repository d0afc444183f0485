"""Speculation with real models: the same tokens as without, the same distribution, fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench, Finished, logits_of
from workers.config import EngineConfig
from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence
from workers.engine.verify import fold, standings
from workers.model.loading import LoadedModel, load
from workers.model.sampler import sample
from workers.model_store import ModelFiles
from workers.protocol import Generate, SamplingParams
from workers.tokenizer import Tokenizer

NGRAM = {"method": "ngram", "ngram_min": 1}
SHARED = [5, 9, 5, 9, 14, 5, 9, 5, 9, 14, 30, 31, 32, 33, 30, 31]
PROMPTS = [[*SHARED, 40 + own, 7, 5, 9] for own in range(5)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that the kernel can run as well."""
    made = tiny.model(hidden_size=64, intermediate_size=64, head_dim=16)
    return tiny.write_directory(made, tmp_path_factory.mktemp("tiny"))


def engine(attention: str, **changes: Any) -> EngineConfig:
    fields = {"device": "cpu", "dtype": "float32", "attention": attention, "threads": 1, "blocks": 64, **changes}
    return EngineConfig(**fields)


@pytest.fixture(scope="module")
def loaded(directory: Path) -> dict[str, LoadedModel]:
    return {name: load(directory, engine(name)) for name in ("native", "batched", "reference")}


def run(model: LoadedModel, config: EngineConfig, requests: list[Generate]) -> tuple[list[Finished], Bench]:
    """All at once, one every other step; then the first once more, for its prefix. By this clock rows cost nothing, so
    that guesses are made whenever there is one."""
    bench = Bench("", config, model)
    bench.engine._clock = lambda: 0
    found = bench.run(requests, stagger=2)
    again = Generate("again", requests[0].tokens, 30, requests[0].params, scope=requests[0].scope)
    return found + bench.run([again]), bench


@pytest.mark.parametrize("attention", ["native", "batched", "reference"])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("blocks", [64, 11])
def test_greedy_tokens_are_the_same(loaded: dict[str, LoadedModel], attention: str, chunk: int, blocks: int) -> None:
    """Chunked or whole prompts, prefix hits, and in a small pool preemption; and guesses were right and wrong."""
    requests = [Generate(f"r{i}", prompt, 40, GREEDY, scope=b"s") for i, prompt in enumerate(PROMPTS)]
    off = engine(attention, blocks=blocks, max_chunk_tokens=chunk)
    on = engine(attention, blocks=blocks, max_chunk_tokens=chunk, speculation=NGRAM)
    plain, _ = run(loaded[attention], off, requests)
    guessed, bench = run(loaded[attention], on, requests)
    assert [one.tokens for one in guessed] == [one.tokens for one in plain]
    for ours, theirs in zip(guessed, plain, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    stats = bench.engine.planner.stats()
    assert stats.drafts_accepted > 5
    assert stats.drafts_rejected > 5
    assert stats.hit_tokens > 0
    assert (bench.preemptions > 0) == (blocks == 11)
    assert sum(len(one.tokens) for one in guessed) == sum(one.last.output_tokens for one in guessed if one.last)


KINDS = [
    {"temperature": 0.7},
    {"temperature": 0.4, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 8, "min_p": 0.02},
    {"temperature": 0.5, "typical_p": 0.8},
    {"temperature": 0.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.05, "logprobs": 4},
    {"temperature": 0.3, "logit_bias": {7: 4.0, 9: -3.0}, "logprobs": 2},
    {"temperature": 0.4, "bad_words": ((5, 9),), "min_tokens": 12, "ignore_eos": False, "stop_token_ids": (30, 31)},
]


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_sampled_tokens_are_the_same(loaded: dict[str, LoadedModel], attention: str) -> None:
    """With every parameter that the sampler knows, alone and in company, and log probabilities with their tokens.

    The kernel's are equal to the last bit, torch's matrix products depend on the number of rows.
    """
    requests = []
    for index, kind in enumerate(KINDS):
        params = SamplingParams(**{"seed": index, "ignore_eos": True, "logprobs": 0, **kind})  # type: ignore[arg-type]
        requests.append(Generate(f"r{index}", PROMPTS[index % 5], 40, params))
    plain, _ = run(loaded[attention], engine(attention), requests)
    guessed, bench = run(loaded[attention], engine(attention, speculation=NGRAM), requests)
    assert [one.tokens for one in guessed] == [one.tokens for one in plain]
    if attention == "native":
        assert [one.logprobs for one in guessed] == [one.logprobs for one in plain]
    stats = bench.engine.planner.stats()
    assert stats.drafts_accepted > 0
    assert stats.drafts_rejected > 0


def test_checked_guesses_keep_the_distribution(loaded: dict[str, LoadedModel]) -> None:
    """Chi-square over 20,000 seeds of a model's own distributions: the first token, and the second where the guess for
    the first was right. The guess is the likeliest token, so that both outcomes are frequent."""
    prompt, samples = PROMPTS[0], 20_000
    table = list(range(4))
    first = logits_of(loaded["native"], prompt, [len(prompt)], table)[-1]
    draft = int(first.argmax())
    second = logits_of(loaded["native"], [*prompt, draft], [len(prompt) + 1], table)[-1]
    params = SamplingParams(temperature=0.8, top_k=40)
    counts = torch.zeros(2, len(first))
    accepted = 0
    for begin in range(0, samples, 2_000):
        chunks, rows = [], []
        for seed in range(begin, begin + 2_000):
            one = Sequence("s", 0, list(prompt), len(prompt), 100, params, seed=seed)
            chunks.append(Chunk(one, len(prompt) - 1, 2, (one,), drafts=[draft]))
            rows += standings(chunks[-1])
        for drawn in fold(chunks, sample(torch.stack([first, second]).repeat(2_000, 1), rows)):
            counts[0, drawn.tokens[0]] += 1
            assert (drawn.tokens[0] == draft) == (len(drawn.tokens) == 2)
            if len(drawn.tokens) == 2:
                accepted += 1
                counts[1, drawn.tokens[1]] += 1
    assert 0.05 * samples < accepted < 0.95 * samples
    for found, logits in zip(counts, (first, second), strict=True):
        kept = logits >= logits.topk(40).values[-1]
        wanted = (logits / 0.8).masked_fill(~kept, -torch.inf).softmax(-1) * found.sum()
        assert found[~kept].sum() == 0
        big = wanted >= 5
        statistic = float(((found - wanted)[big] ** 2 / wanted[big]).sum())
        freedom = int(big.sum()) - 1
        assert statistic < freedom + 4 * np.sqrt(2 * freedom)


COPY = """Repeat this text word for word.

The forebay is the pool just upstream of the turbines, where water is held back and evened out. In 1882 the first
station lit four hundred lamps. To make bread you need flour, water, salt and time."""


def test_a_copy_takes_fewer_steps_on_the_bundled_model(smollm2: ModelFiles) -> None:
    """The same answer in less than half the steps, on the backend that serves."""
    tokenizer = Tokenizer.load(smollm2.dir)
    prompt = tokenizer.encode_chat([{"role": "user", "content": COPY}])
    config = EngineConfig(device="cpu", blocks=32, threads=1)
    model = load(smollm2, config)
    steps, tokens = [], []
    for speculation in (None, {"method": "ngram"}):
        changed = EngineConfig(**{**config.model_dump(), "speculation": speculation})
        bench = Bench("", changed, model)
        found = bench.run([Generate("copy", prompt, 60, SamplingParams(temperature=0.0))])
        steps.append(bench.engine.planner.step)
        tokens.append(found[0].tokens)
    assert tokens[0] == tokens[1]
    assert steps[1] < 0.5 * steps[0]
