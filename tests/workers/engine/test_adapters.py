"""When an adapter comes and when it may go: never under a request that names it, wherever that waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from workers.adapters import LoadedAdapter
from workers.config import EngineConfig
from workers.engine.adapters import AdapterTable, Install, Remove
from workers.engine.loop import Engine
from workers.engine.sequence import Sequence
from workers.protocol import Cancel, Generate, SamplingParams, StepOutputs
from workers.testing import Echo, EchoRunner

ONE, TWO = "sha256:00000001", "sha256:00000002"


def adapter(digest: str, name: str = "sql", size: int = 10) -> LoadedAdapter:
    return LoadedAdapter(name, digest, 1, size, None)


class SlowGrammars:
    """Compiles when a test says so."""

    def __init__(self) -> None:
        self.ready: list[Any] = []

    def compile(self, grammar: str, n: int, done: Any) -> None:
        self.ready.append(done)

    def advance(self, sequences: list[Sequence]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class Site:
    """An engine that is stepped by hand."""

    grammars: SlowGrammars = field(default_factory=SlowGrammars)
    news: list[StepOutputs] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    refused: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = EchoRunner(Echo())
        self.table = AdapterTable(self.runner, most=2, room=25)
        self.engine = Engine(
            EngineConfig(blocks=32, max_running=1),
            self.runner,
            blocks=32,
            max_context=400,
            revision="r",
            eos_ids=[0],
            on_outputs=self.news.append,
            grammars=self.grammars,
            adapters=self.table,
        )

    def install(self, digest: str, **fields: Any) -> str | None:
        self.engine.submit(Install(adapter(digest, **fields), self.refused.append))
        self.engine.step()
        return self.refused[-1]

    def remove(self, digest: str) -> None:
        self.engine.submit(Remove(digest, lambda: self.gone.append(digest)))
        self.engine.step()

    def ask(self, name: str, digest: str, tokens: int = 5, **fields: Any) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        self.engine.submit(Generate(name, [5, 6, 7], tokens, params, adapter=digest, **fields))
        self.engine.step()

    def rest(self) -> None:
        while self.engine.step():
            pass

    def end(self, name: str) -> str | None:
        ends = [one for news in self.news for one in news.outputs if one.id == name and one.finish is not None]
        assert len(ends) == 1
        return ends[0].error or ends[0].finish


def test_an_adapter_goes_with_its_last_request() -> None:
    """One runs, one waits in line: both are answered; a third, too late, is refused; then it is freed, once."""
    site = Site()
    assert site.install(ONE) is None
    site.ask("runs", ONE)
    site.ask("waits", ONE)
    site.remove(ONE)
    assert site.gone == []
    site.ask("late", ONE)
    site.rest()
    assert [site.end(name) for name in ("runs", "waits", "late")] == ["length", "length", "adapter"]
    assert site.gone == [ONE]
    assert len(site.table) == 0
    site.remove(ONE)
    assert site.gone == [ONE, ONE], "what is not there is gone at once"


def test_a_request_whose_grammar_is_being_compiled_counts() -> None:
    site = Site()
    site.install(ONE)
    site.ask("pending", ONE, grammar="start: /a+/")
    site.remove(ONE)
    assert site.gone == []
    site.engine.submit(Cancel("pending"))
    site.rest()
    assert site.gone == [ONE]


def test_one_that_comes_back_before_it_went_stays() -> None:
    site = Site()
    site.install(ONE)
    site.ask("runs", ONE)
    site.remove(ONE)
    assert site.install(ONE, name="again") is None
    assert site.gone == [ONE], "who waited for its end is not left waiting"
    site.ask("more", ONE)
    site.rest()
    assert site.end("more") == "length"
    assert [one.name for one in site.table] == ["sql", "again"]


@pytest.mark.parametrize(
    ("held", "wanted", "size", "said"),
    [
        ((ONE,), TWO, 16, "15 of engine.adapter_memory=25 are left"),
        ((ONE, TWO), "sha256:3", 1, "engine.max_adapters=2"),
    ],
)
def test_bounds_are_said_and_change_nothing(held: tuple[str, ...], wanted: str, size: int, said: str) -> None:
    site = Site()
    for digest in held:
        assert site.install(digest) is None
    refused = site.install(wanted, size=size)
    assert refused is not None
    assert said in refused
    assert [one.digest for one in site.table] == list(held)
    assert site.table.bytes == 10 * len(held)


def test_an_engine_without_adapters_takes_none() -> None:
    table = AdapterTable()
    told: list[str | None] = []
    table.handle(Install(adapter(ONE), told.append))
    assert "give it engine.adapter_memory" in str(told[0])
    assert ONE not in table
