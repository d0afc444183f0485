"""A draft model beside its model: its keys and values follow the blocks through everything that happens to them.

The kernel's rows do not depend on batch or chunks, bit for bit. So a model that guesses for itself is always right,
unless a single one of its keys or values is not what it should be.
"""

from __future__ import annotations

import re
import shutil
import time
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway.choices import ChoiceStream
from gateway.grammars import json_text
from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench
from tests.workers.model.test_speculation import KINDS
from tests.workers.model.test_techniques import guesser
from workers.config import EngineConfig
from workers.grammar import Vocabulary
from workers.grammar_desk import GrammarDesk
from workers.model.draft import DraftRunner
from workers.model.loading import LoadedModel, load
from workers.model.native.runner import NativeRunner
from workers.model.runner import TorchRunner
from workers.protocol import Cancel, Generate, Purge, SamplingParams, StepOutputs
from workers.tokenizer import Tokenizer

B = TypeVar("B", bound=Bench)
SHARED = [(7 * place * place) % 200 for place in range(33)]
PROMPTS = [[*SHARED[: 20 + 3 * own], 210 + own, 7, 9 + own] for own in range(5)]


def write(folder: Path, seed: int, **changes: Any) -> Path:
    fields = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, **changes}
    return tiny.write_directory(tiny.model(seed=seed, **fields), folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, smaller ones that are worth nothing or see little, and one that is right now and then."""
    root = tmp_path_factory.mktemp("draft")
    return {
        "model": write(root / "model", 0),
        "other": write(root / "other", 5, num_hidden_layers=1),
        "short": write(root / "short", 5, num_hidden_layers=1, max_position_embeddings=40),
        "near": guesser(root),
    }


def engine(draft: Path | None, attention: str = "native", **changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention": attention, "threads": 1, "blocks": 64}
    if draft is not None:
        fields["speculation"] = {"method": "draft", "tokens": 3, "draft_model": str(draft)}
    return EngineConfig(**{**fields, **changes})


def bench(source: Path, config: EngineConfig) -> Bench:
    return guessing(Bench(source, config))


def guessing(made: B) -> B:
    """By its clocks rows cost nothing and guesses next to nothing, so that guesses are always made."""
    made.engine._clock = count(step=1000).__next__
    runner = made.model.runner
    if isinstance(runner, DraftRunner):
        runner._clock = count().__next__
    return made


def requests(**fields: Any) -> list[Generate]:
    fields = {"params": GREEDY, "scope": b"s", **fields}
    return [Generate(f"r{number}", prompt, 40, **fields) for number, prompt in enumerate(PROMPTS)]


def guessed_rows(model: LoadedModel) -> int:
    assert isinstance(model.runner, DraftRunner)
    assert isinstance(model.runner.guesser, NativeRunner)
    return model.runner.guesser.decoder.rows_computed


@pytest.mark.parametrize("blocks", [64, 11])
@pytest.mark.parametrize("chunk", [5, 64])
def test_a_model_that_guesses_for_itself_is_always_right(folders: dict[str, Path], blocks: int, chunk: int) -> None:
    """Chunked prompts, prefix hits, and in a small pool preemption: every key and value is where it should be."""
    made = bench(folders["model"], engine(folders["model"], blocks=blocks, max_chunk_tokens=chunk))
    found = made.run(requests(), stagger=2)
    again = made.run([Generate("again", PROMPTS[0], 40, GREEDY, scope=b"s")])
    plain = bench(folders["model"], engine(None)).run(requests())
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert again[0].tokens == plain[0].tokens
    stats = made.engine.planner.stats()
    assert stats.drafts_accepted > 100
    assert stats.drafts_rejected == 0
    assert stats.hit_tokens > 0
    assert (made.preemptions > 0) == (blocks == 11)


def test_what_comes_back_from_a_tier_is_unknown_to_the_draft_model(folders: dict[str, Path]) -> None:
    """Restored blocks hold the larger model's keys and values only: the draft model computes its own first."""
    tiers = [{"kind": "host", "size": "1MiB"}]
    made = bench(folders["model"], engine(folders["model"], blocks=11, tiers=tiers))
    found = made.run(requests(), stagger=2)
    plain = bench(folders["model"], engine(None)).run(requests())
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    stats = made.engine.planner.stats()
    assert stats.tiers["host"].restored_blocks > 0
    assert stats.drafts_accepted > 100
    assert stats.drafts_rejected == 0


def test_choices_share_what_the_draft_model_knows(folders: dict[str, Path]) -> None:
    """n > 1: the tail is copied for both models, each choice then guesses for its own tokens."""
    made = bench(folders["model"], engine(folders["model"]))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    made.run([Generate("a", PROMPTS[1], 30, params, n=3, scope=b"s")])
    assert {tuple(made.done["a", index].tokens) for index in range(3)} == {tuple(made.done["a", 0].tokens)}
    stats = made.engine.planner.stats()
    assert stats.drafts_accepted > 50
    assert stats.drafts_rejected == 0


@pytest.mark.parametrize("attention", ["native", "batched"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_wrong_guesses_change_nothing(folders: dict[str, Path], attention: str, temperature: float) -> None:
    """A draft model that knows nothing of the model's tokens."""
    params = SamplingParams(temperature=temperature, seed=3, ignore_eos=True, top_p=0.95)
    made = bench(folders["model"], engine(folders["other"], attention, blocks=24))
    found = made.run(requests(params=params), stagger=1)
    plain = bench(folders["model"], engine(None, attention, blocks=24)).run(requests(params=params), stagger=1)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert made.engine.planner.stats().drafts_rejected > 0


def test_every_parameter_of_the_sampler(folders: dict[str, Path]) -> None:
    """Penalties, cuts, bias, bans, log probabilities, ends: equal to the last bit, with guesses right and wrong."""
    asked = []
    for index, kind in enumerate(KINDS):
        params = SamplingParams(**{"seed": index, "ignore_eos": True, "logprobs": 0, **kind})  # type: ignore[arg-type]
        asked.append(Generate(f"r{index}", PROMPTS[index % 5], 40, params, scope=b"s"))
    made = bench(folders["model"], engine(folders["near"]))
    found = made.run(asked, stagger=1)
    plain = bench(folders["model"], engine(None)).run(asked, stagger=1)
    assert [(one.tokens, one.logprobs) for one in found] == [(one.tokens, one.logprobs) for one in plain]
    stats = made.engine.planner.stats()
    assert min(stats.drafts_accepted, stats.drafts_rejected) > 5


def test_guesses_are_held_against_the_grammar(folders: dict[str, Path]) -> None:
    """The draft model knows of no grammar: what is forbidden ends its guesses, what is allowed counts."""
    vocabulary = Vocabulary.load(folders["model"])
    grammar = json_text({"type": "string", "pattern": "^[A-Za-z]{20,30}$"})
    texts, drafts = [], []
    for draft in (folders["near"], None):
        desk = GrammarDesk(lambda: vocabulary, threads=1)
        made = bench(folders["model"], engine(draft, blocks=18))
        made.engine._grammars = desk
        params = SamplingParams(temperature=0.6, seed=2)
        asked = requests(params=params, grammar=grammar)
        for request in asked:
            made.engine.submit(request)
        deadline = time.monotonic() + 30
        while sum(one.last is not None for one in made.done.values()) < len(asked):
            assert time.monotonic() < deadline
            if not made.engine.step():
                time.sleep(0.001)  # the grammar is being compiled
        found = [made.done[request.id, 0] for request in asked]
        texts.append([vocabulary_text(folders["model"], one.tokens) for one in found])
        assert {one.last.finish for one in found if one.last} == {"stop"}
        stats = made.engine.planner.stats()
        drafts.append((stats.drafts_accepted > 5, stats.drafts_rejected > 5))
        desk.close()
    assert texts[0] == texts[1]
    assert all(re.fullmatch('"[A-Za-z]{20,30}"', text) for text in texts[0])
    assert drafts == [(True, True), (False, False)]


class Cutting(Bench):
    """Reads answers as the gateway does: one that comes to its stop string is cancelled, whatever is under way."""

    def read(self, tokenizer: Tokenizer, stops: dict[str, str]) -> dict[str, tuple[str, int]]:
        """Text and billed tokens of the requests ``stops`` names, after they ran together."""
        self.streams = {name: ChoiceStream(tokenizer.decoder(), stops=(stop,)) for name, stop in stops.items()}
        self.texts = dict.fromkeys(stops, "")
        self.done.clear()
        self.run(one for one in requests() if one.id in stops)
        return {name: (self.texts[name], stream.billed) for name, stream in self.streams.items()}

    def _take(self, news: StepOutputs) -> None:
        super()._take(news)
        for output in news.outputs:
            delta = self.streams[output.id].take(output)
            self.texts[output.id] += delta.text
            if delta.stopped:
                self.engine.submit(Cancel(output.id))


def test_stop_strings_end_answers_within_runs_of_guesses(folders: dict[str, Path]) -> None:
    """The same text and the same bill; what was guessed beyond the stop leaves nothing behind in either cache."""
    tokenizer = Tokenizer.load(folders["model"])
    free = {request.id: "no such text" for request in requests()}
    plain = Cutting(folders["model"], engine(None))
    whole = {name: text for name, (text, _) in plain.read(tokenizer, free).items()}
    stops = {name: text[at : at + 2] for at, (name, text) in zip((9, 12, 15, 18, 21), whole.items(), strict=True)}
    wanted = plain.read(tokenizer, stops)
    for draft in (folders["model"], folders["near"]):
        made = guessing(Cutting(folders["model"], engine(draft, blocks=24)))
        assert made.read(tokenizer, stops) == wanted
        assert {name: text for name, (text, _) in made.read(tokenizer, free).items()} == whole
        stats = made.engine.planner.stats()
        assert stats.drafts_accepted > 30
        assert (stats.drafts_rejected == 0) == (draft == folders["model"])
    assert all(stop not in wanted[name][0] and wanted[name][1] < 40 for name, stop in stops.items())


def vocabulary_text(folder: Path, tokens: list[int]) -> str:
    return Tokenizer.load(folder).decode(token for token in tokens if token != 2)


def test_a_draft_model_that_is_always_wrong_ends_by_itself(folders: dict[str, Path]) -> None:
    """By this clock a guess costs two fifths of a step: after a few it is hardly ever tried again."""
    made = bench(folders["model"], engine(folders["other"]))
    assert isinstance(made.model.runner, DraftRunner)
    made.model.runner._clock = count(step=400).__next__
    found = made.run([Generate("long", PROMPTS[0], 200, GREEDY)])
    stats = made.engine.planner.stats()
    assert len(found[0].tokens) == 200
    assert 0 < stats.drafts_accepted + stats.drafts_rejected <= 20


def test_sequences_without_guesses_cost_the_draft_model_nothing(folders: dict[str, Path]) -> None:
    """It computes no prompt before it guesses; a prompt longer than a step's budget is caught up in several steps."""
    made = bench(folders["model"], engine(folders["model"], max_step_tokens=16))
    long = [(3 * place) % 290 for place in range(100)]
    made.run([Generate("one", long, 1, GREEDY, scope=b"s")])
    assert guessed_rows(made.model) == 0
    made.run([Generate("more", [*long, 8, 9], 30, GREEDY, scope=b"s")])
    stats = made.engine.planner.stats()
    assert stats.hit_tokens > 0
    assert stats.drafts_accepted > 5
    assert stats.drafts_rejected == 0
    assert max(made.noted.chunks) <= 16


def test_beyond_what_the_draft_model_sees_nobody_guesses(folders: dict[str, Path]) -> None:
    """Its context is 40 tokens, the model's 256."""
    made = bench(folders["model"], engine(folders["short"]))
    found = made.run([Generate("a", PROMPTS[0], 100, GREEDY)])
    plain = bench(folders["model"], engine(None)).run([Generate("a", PROMPTS[0], 100, GREEDY)])
    assert found[0].tokens == plain[0].tokens
    assert made.engine.planner.stats().drafts_rejected > 0
    assert made.noted.chunks[-40:] == [1] * 40


def test_a_purge_zeroes_both(folders: dict[str, Path]) -> None:
    """What a tenant's tokens left in the draft model's cache goes with the rest."""
    made = bench(folders["model"], engine(folders["model"]))
    made.run(requests())
    runner = made.model.runner
    assert isinstance(runner, DraftRunner)
    caches = [one.cache.data for one in (runner.runner, runner.guesser) if isinstance(one, NativeRunner | TorchRunner)]
    assert [bool(cache.any()) for cache in caches] == [True, True]
    made.engine.submit(Purge("p", [b"s"]))
    made.engine.step()
    assert [bool(cache.any()) for cache in caches] == [False, False]
    assert not runner._filled.any()
    hit = made.run([Generate("after", PROMPTS[0], 20, GREEDY, scope=b"s")])[0]
    assert hit.last is not None
    assert hit.last.prompt_cached == 0
    assert made.engine.planner.stats().drafts_rejected == 0


def test_memory_is_planned_for_both(folders: dict[str, Path]) -> None:
    """As many bytes hold half the blocks when a model of the same size guesses; figures name both."""
    plain = load(folders["model"], engine(None, blocks=None, kv_cache=2**20))
    both = load(folders["model"], engine(folders["model"], blocks=None, kv_cache=2**20))
    assert both.blocks == plain.blocks // 2
    assert both.kv_bytes_per_token == 2 * plain.kv_bytes_per_token
    assert both.weight_bytes == 2 * plain.weight_bytes
    assert both.budget.weights == 2 * plain.budget.weights
    assert "guesses by" in both.attention


def test_another_vocabulary_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """By the tokens' texts, or by a model with more ids; with the field, the figures and what to do."""
    copy = shutil.copytree(folders["other"], tmp_path / "renamed")
    text = (copy / "tokenizer.json").read_text(encoding="utf-8")
    (copy / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|finish|>"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"engine\.speculation\.draft_model=.*renamed: its vocabulary .* same family"):
        load(folders["model"], engine(copy))
    wide = write(tmp_path / "wide", 1, vocab_size=320)
    with pytest.raises(ValueError, match=r"draft_model=.*wide: it knows 320 token ids, the model only 300"):
        load(folders["model"], engine(wide))
    with pytest.raises(ValueError, match=r"engine\.speculation\.draft_model=.*nowhere: model source .*does not exist"):
        load(folders["model"], engine(tmp_path / "nowhere"))
