"""``bench serve``: any OpenAI-compatible server, ours or a peer's, under the same load over HTTP.

Rules
- A request's time counts from when it was due, also when this process was late to send it; how late is reported.
- Answers are streamed. A token's time is when the bytes of its event arrived; events without text are not counted. The
  number of tokens is the server's ``usage`` where it sends one.
- Nothing is retried: an answer that is no success is counted under its code.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gateway.bench import metrics
from gateway.bench.http_client import EventReader, HttpClient, HttpError
from gateway.bench.load import Timeline
from gateway.bench.metrics import Figures, Slo
from gateway.bench.pump import Progress
from gateway.bench.report import BenchError
from gateway.bench.traffic import Shot, Tenant, slots

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go, and how they look."""

    url: str
    """With or without ``/v1`` at its end."""
    model: str
    endpoint: Endpoint = "completions"
    ignore_eos: bool = True
    """Ask that end tokens do not end an answer: a common extension that the public OpenAI service refuses."""
    timeout_s: float = 600.0
    streamed: bool = True
    """Ask for streams; else for answers in one piece, whose tokens all come with the last byte."""

    @property
    def base(self) -> str:
        """Without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Error(msgspec.Struct):
    code: Any = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.encode


@dataclass(slots=True)
class _Reader:
    """Fills in one request's timeline while its answer arrives."""

    line: Timeline
    start: float
    events: EventReader = field(default_factory=EventReader)
    complete: bool = False

    def __call__(self, data: bytes, arrived: float) -> None:
        for payload in self.events.feed(data):
            if payload == b"[DONE]":
                self.complete = True
                continue
            try:
                self._take(_decode(payload), arrived - self.start)
            except msgspec.DecodeError:
                self.line.error = "not_json"

    def ended(self) -> None:
        """The answer's last byte was there."""

    def _take(self, event: _Event, now: float) -> None:
        line = self.line
        if event.error is not None:
            line.error = f"stream_{event.error.code or event.error.type or 'error'}"
        if any(choice.text or (choice.delta is not None and choice.delta.content) for choice in event.choices):
            line.times.append(now)
        if event.usage is not None:
            line.input_tokens = event.usage.prompt_tokens or line.input_tokens
            line.output_tokens = event.usage.completion_tokens or None
            details = event.usage.prompt_tokens_details
            line.cached = details.cached_tokens if details is not None else line.cached


@dataclass(slots=True)
class _Whole(_Reader):
    """The same for an answer in one piece."""

    pieces: list[bytes] = field(default_factory=list)
    last: float = 0.0

    def __call__(self, data: bytes, arrived: float) -> None:
        self.pieces.append(data)
        self.last = arrived

    def ended(self) -> None:
        self.complete = True
        try:
            self._take(_decode(b"".join(self.pieces)), self.last - self.start)
        except msgspec.DecodeError:
            self.line.error = "not_json"


class Attack:
    """One run: shots at a server, by several tenants."""

    def __init__(self, server: Server, callers: Sequence[Tenant], client: HttpClient) -> None:
        self._server, self._callers, self._client = server, callers, client
        self._path = "/v1/completions" if server.endpoint == "completions" else "/v1/chat/completions"
        self.late: list[float] = []
        """Seconds by which requests with a time of their own went out late."""

    async def open_loop(self, shots: Sequence[Shot], progress: Progress) -> list[Timeline]:
        """Every shot at its time, whatever became of the others."""
        start = time.perf_counter()
        done = _counted(progress, len(shots))
        tasks: list[asyncio.Task[Timeline]] = []
        async with asyncio.TaskGroup() as group:
            for shot in sorted(shots, key=lambda shot: shot.at or 0.0):
                due = shot.at or 0.0
                wait = start + due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(done(self._fire(shot, f"r{len(tasks)}", start, due))))
        lines = [task.result() for task in tasks]
        self.late += [max(0.0, line.sent - line.submitted) for line in lines if line.sent is not None]
        return lines

    async def closed_loop(
        self, shots: Sequence[Shot], concurrency: int, progress: Progress, *, seconds: float = math.inf
    ) -> list[Timeline]:
        """Each tenant keeps its part of ``concurrency`` under way, a next one whenever one ends.

        After ``seconds`` no further one begins.
        """
        start = time.perf_counter()
        done = _counted(progress, len(shots))
        lines: list[Timeline] = []

        async def slot(queue: deque[Shot]) -> None:
            while queue and (now := time.perf_counter() - start) < seconds:
                shot = queue.popleft()
                lines.append(await done(self._fire(shot, f"r{len(lines)}", start, now)))

        async with asyncio.TaskGroup() as group:
            for index, count in enumerate(slots(concurrency, self._callers)):
                queue = deque(shot for shot in shots if shot.tenant == index)
                for _ in range(count):
                    group.create_task(slot(queue))
        return lines

    async def _fire(self, shot: Shot, name: str, start: float, submitted: float) -> Timeline:
        caller = self._callers[shot.tenant]
        line = Timeline(name, shot.input_tokens, submitted, tenant=caller.name)
        reader = _Reader(line, start) if self._server.streamed else _Whole(line, start)
        try:
            exchange = await self._client.stream(
                "POST",
                self._path,
                self._body(shot),
                reader,
                headers={"authorization": f"Bearer {caller.key}"} if caller.key else {},
                timeout_s=self._server.timeout_s,
            )
        except HttpError as error:
            line.error = error.code
            line.finished = time.perf_counter() - start
            return line
        line.sent, line.finished = exchange.sent - start, exchange.ended - start
        reader.ended()
        if line.error is None and not reader.complete:
            line.error = "stream_incomplete"
        return line

    def _body(self, shot: Shot) -> bytes:
        server = self._server
        fields: dict[str, Any] = {"model": server.model, "max_tokens": shot.max_tokens, "temperature": 0}
        if server.streamed:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if server.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": shot.prompt}]
        else:
            fields["prompt"] = shot.prompt
        if server.ignore_eos:
            fields["ignore_eos"] = True
        return _encode(fields)


def _counted(progress: Progress, total: int) -> Callable[[Awaitable[Timeline]], Coroutine[Any, Any, Timeline]]:
    ended = 0

    async def run(work: Awaitable[Timeline]) -> Timeline:
        nonlocal ended
        line = await work
        ended += 1
        progress(ended, total)
        return line

    return run


async def model_name(client: HttpClient, key: str) -> str:
    """The first model that the server lists. Raises BenchError."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        listed = msgspec.json.decode(await client.get("/v1/models", headers=headers))
        return str(listed["data"][0]["id"])
    except HttpError as error:
        raise BenchError(f"the server's /v1/models cannot be read: {error.code}: {error}") from None
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise BenchError("the server lists no model at /v1/models; name one with --model") from None


class ServerMetrics:
    """What the server itself counted between ``begin`` and ``figures``, from its Prometheus pages."""

    SERIES = ("forebay_queue_wait_seconds_sum", "forebay_queue_wait_seconds_count", "forebay_engine_preemptions_total")

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._before: dict[str, float] = {}

    async def begin(self) -> None:
        """Read the pages. Raises BenchError when one cannot be had."""
        self._before = await self._read()

    async def figures(self) -> Figures:
        """Mean queue wait and preemptions since then; None where no page has the series."""
        if not self._urls:
            return {}
        after = await self._read()
        grown = {name: after[name] - self._before.get(name, 0.0) for name in after}
        count = grown.get("forebay_queue_wait_seconds_count", 0.0)
        wait = grown.get("forebay_queue_wait_seconds_sum", 0.0)
        return {
            "server_queue_mean_ms": round(wait / count * 1e3, 3) if count else None,
            "preemptions": grown.get("forebay_engine_preemptions_total"),
        }

    async def _read(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for url in self._urls:
            client = HttpClient(url)
            try:
                text = (await client.get("", headers={})).decode(errors="replace")
            except HttpError as error:
                raise BenchError(f"--metrics {url}: {error.code}: {error}") from None
            finally:
                client.close()
            for name, value in _samples(text):
                if name in self.SERIES:
                    found[name] = found.get(name, 0.0) + value
        return found


def _samples(text: str) -> list[tuple[str, float]]:
    """(name, value) of every sample of a Prometheus page."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            found.append((series.partition("{")[0], float(value)))
    return found


def figures(lines: Sequence[Timeline], attack: Attack, slo: Slo | None) -> Figures:
    """The run's figures, also per tenant, and how late its requests were sent."""
    made = metrics.summarise(lines, slo)
    if attack.late:
        made["sent_late_p99_ms"] = round((metrics.percentile(attack.late, 0.99) or 0.0) * 1e3, 3)
    tenants = metrics.by_tenant(lines, slo)
    return {**made, "tenants": tenants} if tenants else made
