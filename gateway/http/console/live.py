"""A page's live part as server-sent events: its HTML whenever that changed, and one sample a second for the charts.

Rules
- Unnamed messages are HTML, which htmx morphs into the page; ``forebay:history`` and ``forebay:sample`` are JSON for
  the charts; ``forebay:bye`` says that the session is over.
- At most ``MAX_STREAMS`` at once: each costs a rendering a second. A stream ends with the client, with its session, and
  when a drain is complete, so that an open tab never holds up a stop.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.types import Receive, Send

from gateway import log
from gateway.errors import unavailable
from gateway.history import COLOURS, History, Sample
from gateway.http.middleware import watch_disconnect

_log = log.get("console")

MAX_STREAMS = 32
_OFFSET_S = 0.05
"""So long after the full second, when the new sample is there."""


class Streams:
    """Every open stream."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        """``ended``: whether the gateway has nothing left to show."""
        self._ended = ended
        self._open = 0

    async def serve(self, receive: Receive, send: Send, frames: AsyncIterator[bytes]) -> None:
        """Send frames until there are none or the client is gone. Raises ApiError 503 with too many open."""
        if self._open >= MAX_STREAMS:
            raise unavailable(f"More than {MAX_STREAMS} console pages are open. Close some.", "too_many_streams", 30.0)
        self._open += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            watch = asyncio.create_task(watch_disconnect(receive), name="console watch")
            pump = asyncio.create_task(self._pump(frames, send), name="console stream")
            try:
                await asyncio.wait({watch, pump}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (watch, pump):
                    task.cancel()
                _, failure = await asyncio.gather(watch, pump, return_exceptions=True)
                if isinstance(failure, Exception):  # the page keeps what it has and connects again
                    _log.error("console_stream_failed", failure=log.describe(failure))
        finally:
            self._open -= 1

    async def _pump(self, frames: AsyncIterator[bytes], send: Send) -> None:
        async for frame in frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            if self._ended():
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_HEADERS = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]


def event(data: str, name: str = "") -> bytes:
    """One message."""
    lines = [f"event: {name}"] if name else []
    lines += [f"data: {line}" for line in data.splitlines()]
    return ("\n".join(lines) + "\n\n").encode()


async def frames(
    html: Callable[[], str], signed_in: Callable[[], bool], history: History | None
) -> AsyncIterator[bytes]:
    """What one page gets. ``history``: for the charts, where it has some."""
    last = ""
    drawn = Drawn(history) if history is not None else None
    while signed_in():
        if drawn is not None:
            for frame in drawn.news():
                yield frame
        fresh = html()
        # A comment keeps the line alive, and shows a dead client to the server.
        yield event(fresh) if fresh != last else b": still here\n\n"
        last = fresh
        await asyncio.sleep(1.0 + _OFFSET_S - time.time() % 1.0)
    yield event("signed out", "forebay:bye")


class Drawn:
    """What a page's charts have been sent."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._tenants: list[str] | None = None
        self._at = 0

    def news(self) -> list[bytes]:
        """The whole history at first and whenever a tenant joins, else the last sample, once."""
        tenants = [tenant for tenant in self._history.latest.standings if self._history.colour(tenant) is not None]
        if self._tenants is None or not set(tenants) <= set(self._tenants):
            samples = self._history.samples
            self._tenants = _seen(samples, self._history)
            self._at = samples[-1].at if samples else 0
            series = [{"name": name, "colour": self._history.colour(name)} for name in self._tenants]
            columns = list(zip(*(self._row(sample) for sample in samples), strict=True))
            return [event(json.dumps({"tenants": series, "columns": columns}), "forebay:history")]
        latest = self._history.latest
        if latest.at == self._at:
            return []
        self._at = latest.at
        return [event(json.dumps(self._row(latest)), "forebay:sample")]

    def _row(self, sample: Sample) -> list[float | None]:
        """Time, tokens/s, fairness, six latencies in ms, shed, throttled, then share and entitlement by tenant in %."""
        assert self._tenants is not None
        shares: list[float | None] = []
        for tenant in self._tenants:
            standing = sample.standings.get(tenant)
            shares += [None, None] if standing is None else [_share(standing.share), _share(standing.entitled)]
        return [
            sample.at,
            round(sample.tokens_per_s, 1),
            None if sample.fairness is None else round(sample.fairness, 4),
            *_ms(sample.first_token),
            *_ms(sample.between_tokens),
            sample.shed,
            sample.throttled,
            *shares,
        ]


def _seen(samples: Sequence[Sample], history: History) -> list[str]:
    names = {name for sample in samples for name in sample.standings}
    coloured = [(colour, name) for name in names if (colour := history.colour(name)) is not None]
    return [name for _, name in sorted(coloured)][:COLOURS]


def _share(part: float) -> float:
    return round(part * 100, 2)


def _ms(quantiles: Any) -> list[float | None]:
    if quantiles is None:
        return [None, None, None]
    return [round(seconds * 1e3, 2) for seconds in (quantiles.p50, quantiles.p95, quantiles.p99)]
