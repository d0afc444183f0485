"""The pump, over an engine whose every step is scripted."""

from __future__ import annotations

import pytest

from gateway.bench import load, pump
from gateway.bench.load import Load, Request
from gateway.bench.pump import News

VOCAB = 5000


class OneEach:
    """Every step gives every request a token."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.most = 0
        self.order: list[str] = []

    def submit(self, request: Request) -> None:
        self.left[request.id] = request.max_tokens
        self.order.append(request.id)
        self.most = max(self.most, len(self.left))

    def step(self) -> list[News]:
        news = []
        for name in list(self.left):
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
            news.append(News(name, [7], finished=name not in self.left, cached=3))
        return news


def test_a_closed_loop_keeps_its_number_under_way() -> None:
    engine = OneEach()
    seen: list[tuple[int, int]] = []
    lines = pump.run(engine, load.uniform("u", 10, 4, 3, VOCAB, 4), lambda done, total: seen.append((done, total)))
    assert engine.most == 4
    assert [len(line.times) for line in lines] == [3] * 10
    assert all(line.cached == 3 and line.finished is not None for line in lines)
    assert seen == [(done, 10) for done in range(1, 11)]
    assert engine.order == [f"u-{index}" for index in range(10)]


def test_an_open_loop_has_no_limit() -> None:
    engine = OneEach()
    pump.run(engine, load.uniform("u", 10, 4, 3, VOCAB, None))
    assert engine.most == 10


def test_times_count_from_when_a_request_was_due() -> None:
    work = Load((Request("b", (1,), 1, at=0.02), Request("a", (1,), 2, at=0.0)))
    lines = {line.id: line for line in pump.run(OneEach(), work)}
    assert lines["b"].submitted == 0.02
    assert lines["b"].times[0] >= 0.02
    assert lines["a"].times == sorted(lines["a"].times)


def test_a_request_may_wait_for_anothers_token() -> None:
    engine = OneEach()
    work = load.interrupted("i", VOCAB, stream=(4, 9), prompts=2, length=5, at_token=6, answer=1)
    stream, *others = pump.run(engine, work)
    assert engine.order == ["i-stream", "i-0", "i-1"]
    assert all(other.submitted == stream.times[5] for other in others)


class Silent(OneEach):
    def step(self) -> list[News]:
        return []


def test_an_engine_that_brings_no_news_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "IDLE_STEPS", 50)
    with pytest.raises(pump.StuckError, match="50 steps"):
        pump.run(Silent(), load.uniform("u", 1, 4, 3, VOCAB, 1))


def test_waiting_for_a_token_that_never_comes_is_an_error() -> None:
    work = load.interrupted("i", VOCAB, stream=(4, 3), prompts=1, length=5, at_token=9)
    with pytest.raises(pump.StuckError, match="1 requests wait"):
        pump.run(OneEach(), work)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Load((Request("a", (1,), 1), Request("a", (1,), 1))), "same id"),
        (Load((Request("a", (1,), 1, after=("b", 1)),)), "no request of it"),
        (Load((Request("a", (1,), 1),), concurrency=0), "concurrency must be 1"),
    ],
)
def test_a_load_that_cannot_be_run_is_refused(work: Load, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pump.run(OneEach(), work)


def test_the_longest_step_is_of_what_was_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other each has its own steps; together they have the same ones. The clock only goes in steps."""
    clock = [0.0]
    took = iter([3.0, 1.0, 1.0, 2.0, 5.0, 1.0])

    class Timed(OneEach):
        def step(self) -> list[News]:
            clock[0] += next(took)
            return super().step()

    monkeypatch.setattr(pump.time, "perf_counter", lambda: clock[0])
    lines = pump.run(Timed(), load.uniform("u", 2, 4, 2, VOCAB, 1))
    assert [line.longest_step for line in lines] == [3.0, 2.0]
    lines = pump.run(Timed(), load.uniform("u", 2, 4, 2, VOCAB, None))
    assert [line.longest_step for line in lines] == [5.0, 5.0]
