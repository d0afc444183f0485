"""The largest gap and what it is held against, on an engine that computes chunks by a clock of its own."""

from __future__ import annotations

import pytest

from gateway.bench import gap, pump
from gateway.bench.load import Load, Request, Timeline
from gateway.bench.pump import News

CHUNK = 32


class Chunked:
    """Each step computes ``CHUNK`` tokens of one prompt, at 1 ms each and 1 ms more for 10 before them, and gives all
    others a token, which takes 1 ms."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self._known: dict[str, int] = {}
        self._wanted: dict[str, Request] = {}

    def submit(self, request: Request) -> None:
        self._wanted[request.id] = request
        self._known[request.id] = 0

    def step(self) -> list[News]:
        news, ms, chunked = [], 1.0, False
        for name, request in list(self._wanted.items()):
            known, length = self._known[name], len(request.tokens)
            if known >= length:
                self._known[name] += 1
            elif not chunked:
                chunked, count = True, min(CHUNK, length - known)
                ms += sum(1 + place / 10 for place in range(known, known + count))
                self._known[name] += count
            if self._known[name] >= length and (known >= length or chunked):
                finished = self._known[name] - length + 1 >= request.max_tokens
                news.append(News(name, [7], finished))
                if finished:
                    del self._wanted[name]
        self._clock[0] += ms / 1e3
        return news


def test_a_gap_is_one_chunk_and_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(pump.time, "perf_counter", lambda: clock[0])

    def run(work: Load) -> list[Timeline]:
        return pump.run(Chunked(clock), work)

    found, lines = gap.measure(run, "g", 5000, CHUNK, stream=(8, 30), prompts=2, length=3 * CHUNK, at_token=6)
    deepest = 1 + sum(1 + place / 10 for place in range(2 * CHUNK, 3 * CHUNK))
    assert found.step_ms == 1
    assert found.first_chunk_ms == pytest.approx(1 + sum(1 + place / 10 for place in range(CHUNK)))
    assert found.longest_chunk_ms == pytest.approx(deepest)
    assert found.largest_gap_ms == pytest.approx(deepest), "its own token rides in the same step"
    assert found.of_limit == pytest.approx(deepest / (deepest + 1))
    assert [len(line.times) for line in lines] == [30, 8, 8]
