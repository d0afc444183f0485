"""Drives an engine that advances by steps through a load and writes down when each token came. Standard library only.

The one loop that our engine and every peer are run by, each in its own process: submit what is due, step, note times.
A token's time is when ``step`` returned, which is when a server could have sent it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.bench.load import Load, Request, Timeline

Progress = Callable[[int, int], None]
"""Called with (requests ended, all)."""


@dataclass(frozen=True, slots=True)
class News:
    """What a step brought for one request."""

    id: str
    tokens: Sequence[int]
    """New output tokens, over all its choices."""
    finished: bool = False
    cached: int | None = None
    scheduled: float | None = None
    """``time.perf_counter`` when the engine took it from its line."""
    error: str | None = None


class StepEngine(Protocol):
    """An engine under test."""

    def submit(self, request: Request) -> None:
        """Take a request; greedy, and no end token stops it."""
        ...

    def step(self) -> list[News]:
        """Advance by one step."""
        ...


class StuckError(RuntimeError):
    """The engine has work and brings no news any more."""


IDLE_STEPS = 100_000
"""So many steps in a row without news, and the engine is taken for stuck."""


def run(engine: StepEngine, load: Load, progress: Progress = lambda done, total: None) -> list[Timeline]:
    """Timelines in the load's order. Raises StuckError, and what the engine raises."""
    return _Run(engine, load, progress).go()


class _Run:
    def __init__(self, engine: StepEngine, load: Load, progress: Progress) -> None:
        self._engine = engine
        self._limit = load.concurrency or len(load.requests)
        self._progress = progress
        self.lines = {request.id: Timeline(request.id, len(request.tokens)) for request in load.requests}
        if len(self.lines) != len(load.requests):
            raise ValueError("load: two requests have the same id")
        if load.concurrency is not None and load.concurrency < 1:
            raise ValueError(f"load: concurrency must be 1 or more, got {load.concurrency}")
        timed = [request for request in load.requests if request.after is None]
        self._due = deque(timed if load.concurrency else sorted(timed, key=lambda request: request.at))
        self._held: dict[str, list[Request]] = {}
        for request in load.requests:
            if request.after is not None:
                if request.after[0] not in self.lines:
                    raise ValueError(f"load: {request.id} waits for {request.after[0]!r}, which is no request of it")
                self._held.setdefault(request.after[0], []).append(request)
        self._closed = load.concurrency is not None
        self._keep = load.keep_answers
        self._running = 0
        self._done = 0
        self._longest = 0.0

    def go(self) -> list[Timeline]:
        start = time.perf_counter()
        idle = 0
        total = len(self.lines)
        while self._done < total:
            self._submit(time.perf_counter() - start)
            if not self._running:
                if not self._due:
                    raise StuckError(f"{total - self._done} requests wait for tokens that never come")
                time.sleep(max(0.0, self._due[0].at - (time.perf_counter() - start)))
                continue
            began = time.perf_counter()
            news = self._engine.step()
            now = time.perf_counter() - start
            self._longest = max(self._longest, now + start - began)
            for item in news:
                self._note(item, now, start)
            idle = 0 if news else idle + 1
            if idle >= IDLE_STEPS:
                raise StuckError(f"no news in {IDLE_STEPS} steps; {self._running} requests are under way")
        return list(self.lines.values())

    def _submit(self, now: float) -> None:
        while self._due and self._running < self._limit and (self._closed or self._due[0].at <= now):
            request = self._due.popleft()
            self._send(request, now if self._closed else request.at)

    def _send(self, request: Request, submitted: float) -> None:
        self.lines[request.id].submitted = submitted
        if not self._running:
            self._longest = 0.0
        self._running += 1
        self._engine.submit(request)

    def _note(self, news: News, now: float, start: float) -> None:
        line = self.lines[news.id]
        line.times.extend([now] * len(news.tokens))
        if self._keep:
            line.answer.extend(news.tokens)
        if news.cached is not None:
            line.cached = news.cached
        if news.scheduled is not None:
            line.scheduled = news.scheduled - start
        if news.error is not None:
            line.error = news.error
        waiting = self._held.get(news.id)
        if waiting:
            ready = [request for request in waiting if request.after is not None and request.after[1] <= line.outputs]
            for request in ready:
                waiting.remove(request)
                self._send(request, now)
        if news.finished:
            line.finished = now
            line.longest_step = self._longest
            self._running -= 1
            self._done += 1
            self._progress(self._done, len(self.lines))
