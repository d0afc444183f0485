"""Log probabilities of prompts are transformers', on every backend, warm and cold, in any order (engine A13)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.model import tiny
from tests.workers.model.harness import Bench
from workers.config import EngineConfig
from workers.model.scores import Scored, score
from workers.protocol import Generate, SamplingParams, StepOutputs, TokenLogprob

TOP = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_directory(
        tiny.model(3, hidden_size=64, intermediate_size=96, head_dim=16), tmp_path_factory.mktemp("scores")
    )


class Scoring(Bench):
    """A bench that keeps the scores of prompts."""

    def __init__(self, source: Path, engine: EngineConfig) -> None:
        self.scores: dict[str, list[TokenLogprob]] = {}
        super().__init__(source, engine)

    def _take(self, news: StepOutputs) -> None:
        for output in news.outputs:
            self.scores.setdefault(output.id, []).extend(output.prompt_logprobs)
        super()._take(news)


def oracle(directory: Path, prompt: list[int]) -> torch.Tensor:
    """Log probabilities [len(prompt) - 1, vocab] of what follows each token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)


@pytest.mark.parametrize("attention", ["native", "batched", "reference"])
def test_scores_are_transformers_whatever_is_cached(attention: str, directory: Path) -> None:
    hold_scores(directory, attention, "cpu")


def hold_scores(directory: Path, attention: str, device: str) -> None:
    """Against transformers, in three orders; ``test_on_gpu.py`` too."""
    engine = EngineConfig(
        device=device, dtype="float32", attention=attention, block_size=16, blocks=48, max_step_tokens=48, max_running=8
    )
    bench = Scoring(directory, engine)
    generator = torch.Generator().manual_seed(7)
    long = torch.randint(3, 300, (150,), generator=generator).tolist()
    prompts = {"long": long, "prefix": long[:77], "one": long[:1], "two": long[5:7]}
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=TOP, prompt_logprobs=True)
    turns = [list(prompts), list(reversed(prompts)), ["prefix", "two", "long", "one"]]
    for turn, names in enumerate(turns):
        requests = [Generate(f"{turn} {name}", prompts[name], 4, params, n=1 + turn % 2, scope=b"s") for name in names]
        # Beside answers that need no scores: their rows are the same steps'.
        plain = Generate(f"{turn} plain", long[:30], 6, SamplingParams(temperature=0.0, ignore_eos=True), scope=b"s")
        bench.run([*requests, plain], stagger=1)
    for name, prompt in prompts.items():
        expected = oracle(directory, prompt)
        best = expected.topk(TOP, dim=-1)
        for turn in range(len(turns)):
            found = bench.scores[f"{turn} {name}"]
            assert [one.token for one in found] == prompt[1:]
            own = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.int64)]
            assert torch.allclose(torch.tensor([one.logprob for one in found]), own, atol=2e-4)
            for one, values in zip(found, best.values, strict=True):
                assert [chance for _, chance in one.top] == pytest.approx(values.tolist(), abs=2e-4)
        answers = {tuple(bench.done[f"{turn} {name}", 0].tokens) for turn in range(len(turns))}
        assert len(answers) == 1
    assert len({tuple(bench.done[f"{turn} plain", 0].tokens) for turn in range(len(turns))}) == 1
    assert bench.scores["0 plain"] == []


def test_broken_rows_have_scores_that_say_so() -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0], [float("inf"), 0.0, 0.0], [float("nan")] * 3])
    (scores,) = score(logits, [Scored(range(3), [1, 0, 2], 1)])
    assert [one.logprob for one in scores] == [-float("inf"), 0.0, -float("inf")]
    assert scores[0].top[0][0] == 2
    assert logits[0, 2] == 1.0, "the sampler reads them after this"
