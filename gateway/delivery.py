"""How an answer reaches its caller: in one piece, or as a stream that is neither silent nor waits for ever.

Rules
- The request's own task writes, nobody else: a timer per stream (``Pulse``) only asks for a comment, or gives up.
- Nothing is sent before the first output or the failure is known, so that a refusal has its status; unless the operator
  sets ``streams.begin_after_s``: then a stream that still waits begins with a comment.
- A comment is no output: the work may still be repeated after it.
- What can be made before the first output is: the worker is at work then, and its caller waits for both.
- A reader that takes nothing for ``slow_reader_s``, or lets ``max_backlog_bytes`` pile up, is given up: its request
  ends as ``cancelled`` and what ran is settled. One with an ``Idempotency-Key`` goes on, as when its caller is gone.
- The reservation is settled before the last byte, or right behind it where that is done at once; then a stream's last
  text goes out with its end in one write. Else the text does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial

from gateway.choices import ChoiceDelta
from gateway.errors import slow_reader
from gateway.http import sse
from gateway.http.openai import Format, collect
from gateway.replays import REPLAYED, Recording
from gateway.report import Reporter
from gateway.settings import Streams
from gateway.ticket import Ticket
from gateway.visit import Head, Visit, encode_json, head

Settle = Callable[[Visit], asyncio.Task[None] | None]
"""``Settler.soon``: what has to be waited for before the last byte, by who must not cancel it."""
_STREAM = head(sse.HEADERS)

TICK_S = 1.0
"""How often a stream is looked after, at most."""


class Delivery:
    """Hands out answers. One per gateway; state of a request is in its ``Visit``."""

    def __init__(self, reporter: Reporter, streams: Streams, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._clock = clock
        self.streams = streams
        """For streams that begin from now on. May be changed at any time."""

    async def stream(self, visit: Visit, ticket: Ticket, answer: Format, settle: Settle) -> None:
        """The answer as it comes. Raises what the ticket ends with."""
        begin = partial(self._begin, visit, [*_STREAM, *head(visit.headers(self._clock()))])
        if self.streams.begin_after_s is not None:
            await self._begin_while_waiting(visit, ticket, self.streams.begin_after_s, begin)
        said: list[ChoiceDelta] = []
        pulse = Pulse(visit, ticket, self.streams)
        last = b""
        try:
            async for batch in ticket.batches():
                data = await _made(ticket, partial(answer.stream, batch)) if batch else sse.KEEP_ALIVE
                if not data or not (batch or visit.reply.begun):
                    continue
                said.extend(batch if visit.trace.captures_content else ())
                if ticket.done and ticket.error is None:
                    last += data  # there may be more that came while this was made
                    continue
                await begin()
                await visit.reply.write(data)
            self._reporter.content(visit, said)
            if (settlement := settle(visit)) is not None:
                if last:
                    await begin()
                    await visit.reply.write(last)
                    last = b""
                visit.delivered = True
                await asyncio.shield(settlement)
            visit.delivered = True
            await begin()
            await visit.reply.end(last + answer.closing(ticket.usage))
        finally:
            pulse.stop()

    async def whole(self, visit: Visit, ticket: Ticket, answer: Format, settle: Settle) -> None:
        """The answer in one piece. Raises what the ticket ends with."""
        headers = head(visit.headers(self._clock()))
        deltas = [delta async for batch in ticket.batches() for delta in batch]
        body = await _made(ticket, lambda: encode_json(answer.full(collect(deltas, ticket.choices), ticket.usage)))
        self._reporter.content(visit, deltas)
        if (settlement := settle(visit)) is not None:
            await asyncio.shield(settlement)
        visit.trace.event("first_byte")
        await visit.reply.whole(200, headers, body)

    async def replay(self, visit: Visit, recording: Recording) -> None:
        """Another request's answer, as far as it is and as it comes. Raises ApiError 503 where it breaks off."""
        limit_s = self.streams.slow_reader_s
        async with contextlib.aclosing(recording.follow()) as pieces:
            async for data in pieces:
                try:
                    async with asyncio.timeout(limit_s):
                        if not visit.reply.begun:
                            own = visit.headers(self._clock())
                            headers = {**dict(recording.headers), **own, REPLAYED: "true"}
                            await visit.reply.begin(recording.status or 200, head(headers))
                            visit.trace.event("first_byte")
                        if data:
                            await visit.reply.write(data)
                except TimeoutError:
                    raise slow_reader("The stream was not read fast enough and was ended.") from None
        visit.delivered = True
        await visit.reply.end()

    async def _begin(self, visit: Visit, headers: Head) -> None:
        if not visit.reply.begun:
            await visit.reply.begin(200, headers)
            visit.trace.event("first_byte")

    async def _begin_while_waiting(
        self, visit: Visit, ticket: Ticket, patience_s: float, begin: Callable[[], Awaitable[None]]
    ) -> None:
        pause: float | None = patience_s
        while not await _ready(ticket, pause):
            await begin()
            await visit.reply.write(sse.KEEP_ALIVE)
            pause = self.streams.keep_alive_s


async def _made(ticket: Ticket, make: Callable[[], bytes]) -> bytes:
    """An answer's bytes; in a thread where it repeats a prompt with every token's scores, which may be many."""
    if not ticket.prepared.request.params.prompt_logprobs:
        return make()
    return await asyncio.to_thread(make)


async def _ready(ticket: Ticket, within_s: float | None) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await ticket.wait_first()
    except TimeoutError:
        return False
    return True


class Pulse:
    """Looks after one stream until ``stop``: one timer, nothing per token."""

    def __init__(self, visit: Visit, ticket: Ticket, streams: Streams) -> None:
        self._visit = visit
        self._ticket = ticket
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._every_s = min(TICK_S, streams.slow_reader_s / 2, (streams.keep_alive_s or TICK_S) / 2)
        self._timer = self._loop.call_later(self._every_s, self._tick)

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _tick(self) -> None:
        reply, streams = self._visit.reply, self._streams
        quiet_s = time.monotonic() - reply.written_at
        if reply.writing:
            if quiet_s >= streams.slow_reader_s or self._ticket.backlog >= streams.max_backlog_bytes:
                self._give_up()
                return
        elif reply.begun and streams.keep_alive_s is not None and quiet_s >= streams.keep_alive_s:
            self._ticket.nudge()
        self._timer = self._loop.call_later(self._every_s, self._tick)

    def _give_up(self) -> None:
        onward = self._visit.onward
        if onward is None:
            self._visit.cut(slow_reader("The stream was not read fast enough and was ended."))
        else:  # somebody else may read it, or this caller come again for it
            onward.leave()
            self._visit.gone()
