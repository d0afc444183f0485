"""The worker's grammars with the real engine loop: every answer matches, whatever schedule ran it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.grammars import json_text
from tests.workers import tiny_model
from workers import grammar_desk
from workers.config import EngineConfig
from workers.engine.loop import Engine
from workers.engine.plan import Sampled
from workers.engine.sequence import Sequence
from workers.engine.testing import FakeRunner, next_token
from workers.grammar import GrammarError, Vocabulary
from workers.grammar_desk import GrammarDesk
from workers.protocol import Cancel, Drain, Generate, SamplingParams, SequenceOutput, StepOutputs
from workers.tokenizer import Tokenizer

ENDS = (0, 2)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 99}},
    "required": ["word", "n"],
    "additionalProperties": False,
}
GRAMMAR = json_text(SCHEMA)


class Obedient(FakeRunner):
    """Samples by hash among what the grammar allows."""

    def sample(self, sequence: Sequence, line: list[int]) -> Sampled:
        if sequence.constraint is None:
            return super().sample(sequence, line)
        mask = sequence.constraint.allowed()
        if mask is None:
            return Sampled([], error="grammar")
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        return Sampled([int(allowed[next_token(line, sequence.seed, len(allowed))])])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def vocabulary(directory: Path) -> Vocabulary:
    return Vocabulary.load(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture
def desk(vocabulary: Vocabulary) -> Iterator[GrammarDesk]:
    made = GrammarDesk(lambda: vocabulary, threads=2)
    yield made
    made.close()


class Bench:
    """An engine, stepped by hand, with everything it says."""

    def __init__(self, desk: GrammarDesk | None, *, blocks: int = 256, **config: Any) -> None:
        self.outputs: list[SequenceOutput] = []
        self.drained = False
        self.engine = Engine(
            EngineConfig(block_size=4, **config),
            Obedient(blocks, 4, vocab=tiny_model.VOCAB),
            blocks=blocks,
            max_context=4000,
            revision="r",
            eos_ids=ENDS,
            on_outputs=self._said,
            on_drained=self._on_drained,
            grammars=desk,
        )

    def _on_drained(self) -> None:
        self.drained = True

    def _said(self, message: StepOutputs) -> None:
        self.outputs.extend(message.outputs)

    def until_ended(self, count: int) -> dict[tuple[str, int], SequenceOutput]:
        """Step until ``count`` sequences have ended."""
        end = time.monotonic() + 30
        while len(self.ends()) < count:
            assert time.monotonic() < end, "did not end in time"
            if not self.engine.step():
                time.sleep(0.001)
        self.engine.planner.check()
        return self.ends()

    def ends(self) -> dict[tuple[str, int], SequenceOutput]:
        return {(one.id, one.index): one for one in self.outputs if one.finish is not None}

    def text(self, tokenizer: Tokenizer, name: str, index: int = 0) -> str:
        return tokenizer.decode(t for one in self.outputs if (one.id, one.index) == (name, index) for t in one.tokens)


def constrained(name: str, prompt: int = 9, max_tokens: int = 600, **fields: Any) -> Generate:
    """A request whose prompt is its own."""
    start = 300 + 13 * sum(name.encode()) % 500
    fields = {"grammar": GRAMMAR, "params": SamplingParams(seed=3), **fields}
    return Generate(name, list(range(start, start + prompt)), max_tokens, scope=b"s", **fields)


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 64, "max_chunk_tokens": 3},
    {"max_running": 2},
    {"mode": "static", "max_running": 3},
    {"prefix_cache": False},
    {"speculation": {"method": "ngram", "tokens": 6, "ngram_min": 1}},
]


@pytest.mark.parametrize("config", SCHEDULES, ids=str)
def test_answers_match_and_do_not_depend_on_the_schedule(
    desk: GrammarDesk, tokenizer: Tokenizer, config: dict[str, Any]
) -> None:
    """n > 1, chunked prompts, waiting choices, prefix hits; unconstrained requests beside them are left alone."""
    bench = Bench(desk, **config)
    for name in ("a", "b", "a2"):
        bench.engine.submit(constrained(name, n=3))
    free = Generate("free", [5, 6, 7], 12, SamplingParams(seed=1, ignore_eos=True))
    bench.engine.submit(free)
    ends = bench.until_ended(10)
    alone = Bench(desk)
    alone.engine.submit(constrained("a", n=3))
    alone.until_ended(3)
    for (name, index), end in ends.items():
        if name == "free":
            assert (end.finish, end.output_tokens) == ("length", 12)
            continue
        assert end.finish == "stop"
        value = json.loads(bench.text(tokenizer, name, index))
        assert list(value) == ["word", "n"]
    for index in range(3):
        assert bench.text(tokenizer, "a", index) == alone.text(tokenizer, "a", index)


def test_guesses_are_held_against_the_grammar(desk: GrammarDesk, tokenizer: Tokenizer) -> None:
    """Behind each guess the mask of that place; the answers are those without guesses, in fewer steps.

    The prompt has the answer's words, so that the guesses are often right; a guess that the grammar forbids ends them.
    """
    grammar = json_text({"const": "ab" * 150})
    prompt = tokenizer.encode_text('"' + "ab" * 40 + '"', special=False)
    found = {}
    for name, config in (("off", {}), ("on", {"speculation": {"method": "ngram", "tokens": 6, "ngram_min": 1}})):
        bench = Bench(desk, **config)
        for number in range(4):
            bench.engine.submit(
                Generate(f"{number}", prompt[: 10 + number], 600, SamplingParams(seed=number), grammar=grammar)
            )
        ends = bench.until_ended(4)
        assert {end.finish for end in ends.values()} == {"stop"}
        found[name] = [bench.text(tokenizer, f"{number}") for number in range(4)]
        stats = bench.engine.planner.stats()
        assert (stats.drafts_accepted > 0, stats.drafts_rejected > 0) == ((name == "on"),) * 2
    assert found["on"] == found["off"]
    assert {json.loads(text) for text in found["on"]} == {"ab" * 150}


def test_a_preempted_sequence_goes_on_where_its_grammar_was(desk: GrammarDesk, tokenizer: Tokenizer) -> None:
    bench = Bench(desk, blocks=24, max_running=6)
    names = [f"p{i}" for i in range(6)]
    for name in names:
        bench.engine.submit(constrained(name, max_tokens=80))
    ends = bench.until_ended(len(names))
    assert bench.engine.planner.roster.preemptions > 0
    for name in names:
        if ends[name, 0].finish == "stop":
            assert set(json.loads(bench.text(tokenizer, name))) == {"word", "n"}
    assert any(end.finish == "stop" for end in ends.values())


def test_a_short_answer_stops_however_many_tokens_are_left(desk: GrammarDesk, tokenizer: Tokenizer) -> None:
    """engine F3: the matcher is not advanced past its end."""
    bench = Bench(desk)
    bench.engine.submit(constrained("short", max_tokens=900, grammar=json_text({"const": 7})))
    end = bench.until_ended(1)["short", 0]
    assert end.finish == "stop"
    assert bench.text(tokenizer, "short") == "7"


@pytest.mark.parametrize("grammar", ["start: [", json_text({"type": "nope"}), "start: missing", "%json"])
def test_a_grammar_that_does_not_compile_costs_its_request_only(desk: GrammarDesk, grammar: str) -> None:
    """engine F1."""
    bench = Bench(desk)
    bench.engine.submit(constrained("bad", n=2, grammar=grammar))
    bench.engine.submit(constrained("good"))
    ends = bench.until_ended(3)
    assert {(ends["bad", i].finish, ends["bad", i].error) for i in range(2)} == {("error", "grammar")}
    assert ends["good", 0].finish == "stop"


def test_a_grammar_that_fails_on_the_way_costs_its_request_only(
    desk: GrammarDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the library, or a panic of it, in the middle of an answer."""
    bench = Bench(desk)
    for name in ("fails", "panics", "good"):
        bench.engine.submit(constrained(name, grammar=json_text({"const": "x" * 300})))
    running = bench.engine.planner.roster.running
    wanted = {"fails", "panics", "good"}
    while {sequence.id for sequence in running} != wanted:
        bench.engine.step()
        assert not bench.ends(), "one has ended before all had begun"
        time.sleep(0.001)
    whose = {sequence.constraint: sequence.id for sequence in running}
    real = grammar_desk.TokenConstraint.catch_up

    class Panic(BaseException):
        pass

    class Broken:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def consume(self, tokens: list[int]) -> None:
            raise self.error

    def catch_up(self: grammar_desk.TokenConstraint, tokens: list[int]) -> None:
        if whose.get(self) in ("fails", "panics"):
            self._matcher = Broken(GrammarError("limit") if whose[self] == "fails" else Panic())  # type: ignore[assignment]
        real(self, tokens)

    monkeypatch.setattr(grammar_desk.TokenConstraint, "catch_up", catch_up)
    ends = bench.until_ended(3)
    assert [ends[name, 0].error for name in ("fails", "panics", "good")] == ["grammar", "grammar", None]
    assert ends["good", 0].finish == "stop"


def test_without_grammars_a_request_with_one_is_refused() -> None:
    bench = Bench(None)
    bench.engine.submit(constrained("x"))
    assert bench.until_ended(1)["x", 0].error == "bad_request"


class Slow:
    """A vocabulary whose compiler waits for a sign."""

    def __init__(self, inner: Vocabulary) -> None:
        self._inner = inner
        self.go = threading.Event()

    def compile(self, grammar: str) -> Any:
        assert self.go.wait(30)
        return self._inner.compile(grammar)


@pytest.fixture
def slow(vocabulary: Vocabulary) -> Iterator[tuple[Slow, GrammarDesk]]:
    compiler = Slow(vocabulary)
    made = GrammarDesk(lambda: compiler)  # type: ignore[arg-type, return-value]
    yield compiler, made
    compiler.go.set()
    made.close()


def test_nobody_waits_for_a_compiler(slow: tuple[Slow, GrammarDesk]) -> None:
    """Others run while a grammar compiles; a duplicate id is dropped; a cancel ends the wait at once."""
    compiler, desk = slow
    bench = Bench(desk)
    bench.engine.submit(constrained("waits"))
    bench.engine.submit(constrained("waits"))
    bench.engine.submit(constrained("leaves", n=2))
    bench.engine.submit(Generate("free", [5, 6, 7], 5, SamplingParams(ignore_eos=True)))
    assert set(bench.until_ended(1)) == {("free", 0)}
    bench.engine.submit(Cancel("leaves"))
    ends = bench.until_ended(3)
    assert {ends["leaves", i].finish for i in range(2)} == {"cancelled"}
    compiler.go.set()
    assert bench.until_ended(4)["waits", 0].finish == "stop"


def test_a_choice_cancelled_while_its_grammar_compiles(slow: tuple[Slow, GrammarDesk]) -> None:
    compiler, desk = slow
    bench = Bench(desk)
    bench.engine.submit(constrained("n", n=3))
    bench.engine.submit(Cancel("n", 1))
    bench.engine.step()
    compiler.go.set()
    ends = bench.until_ended(3)
    assert [ends["n", i].finish for i in range(3)] == ["stop", "cancelled", "stop"]


def test_a_drain_waits_for_what_compiles_and_a_stop_does_not(slow: tuple[Slow, GrammarDesk]) -> None:
    compiler, desk = slow
    bench = Bench(desk)
    bench.engine.submit(constrained("early"))
    bench.engine.submit(Drain())
    bench.engine.submit(constrained("late"))
    assert bench.until_ended(1)["late", 0].error == "draining"
    assert not bench.drained
    compiler.go.set()
    assert bench.until_ended(2)["early", 0].finish == "stop"
    assert bench.drained
    compiler.go.clear()
    stopped = Bench(desk)
    stopped.engine.submit(constrained("cut", grammar=json_text({"const": "not compiled yet"})))
    stopped.engine.step()
    stopped.engine.stop()
    assert stopped.ends()["cut", 0].error == "draining"


def test_compiled_grammars_are_kept_and_bounded(desk: GrammarDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """security 41: unique schemas fill nothing."""
    monkeypatch.setattr(grammar_desk, "KEPT", 8)
    compiled: list[str] = []
    real = Vocabulary.compile
    monkeypatch.setattr(Vocabulary, "compile", lambda self, text: (compiled.append(text), real(self, text))[1])
    bench = Bench(desk)
    schemas = [json_text({"const": i}) for i in range(40)]
    for i, schema in enumerate(schemas):
        bench.engine.submit(constrained(f"u{i}", grammar=schema))
    bench.until_ended(40)
    assert len(desk._kept) == 8

    def ours() -> list[str]:  # a desk of another test may still be at its last
        return [text for text in compiled if text in schemas]

    assert sorted(ours()) == sorted(schemas)
    bench.engine.submit(constrained("again", grammar=schemas[39]))
    bench.until_ended(41)
    assert len(ours()) == 40
