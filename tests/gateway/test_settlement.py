"""A fault at every await of a request: one settlement, every slot back (issue 2; gateway A3, A5, C1, C3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway import pipeline as pipeline_module
from gateway.app import ENDPOINTS
from gateway.http.middleware import LAST
from gateway.ticket import Ticket, TicketState
from policies.types import JobId, Usage
from tests.gateway.harness import MODEL, Site, tickets, token
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")
ECHO = Echo(step_s=0.002)
SETTINGS = {
    # The caller is watched from its whole body on; before that, the policies' time budget bounds how long it is missed.
    "timeouts": {"policy_s": 0.2},
    "tenants": [{"id": "alpha", "limits": {"concurrent": 100, "tokens_per_minute": 1000000}}],
}

POINTS = [
    "authenticate",
    "receive",
    "parse",
    "prepare",
    "reserve, before",
    "reserve, after",
    "first token",
    "output",
    "send status",
    "send part",
    "send last",
    "settle",
]
[COMPLETIONS] = [endpoint for endpoint in ENDPOINTS if endpoint.route == "/v1/completions"]
HOLDS_NOTHING = {"authenticate", "receive", "parse", "prepare"}


class BoomError(Exception):
    """A fault that no part of the gateway expects."""


class Exchange:
    """One ASGI request, driven by hand, with a fault at one point."""

    def __init__(self, site: Site, point: str, how: str, stream: bool) -> None:
        self.pipeline = site.gateway.parts.pipeline
        self.point = point
        self.how = how
        self.sent: list[dict[str, Any]] = []
        self.settled: list[tuple[JobId, Usage]] = []
        self.reserved: list[JobId] = []
        self.hit = False
        self.gone = asyncio.Event()
        self.body = json.dumps({"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 40, "stream": stream}).encode()
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": COMPLETIONS.route,
            "headers": [(b"authorization", f"Bearer {token('alpha')}".encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "forebay.request_id": "req_test",
        }
        self.task: asyncio.Task[None] | None = None
        self._asked = 0

    async def at(self, point: str) -> None:
        """The request passes ``point``."""
        if point != self.point or self.hit:
            return
        self.hit = True
        if self.how == "raises":
            raise BoomError
        if self.how == "server cancels":
            assert self.task is not None
            self.task.cancel()
        else:
            self.gone.set()
        if not (self.gone.is_set() and point == "receive"):
            await asyncio.sleep(30)

    async def receive(self) -> dict[str, Any]:
        self._asked += 1
        if self._asked == 1:
            await self.at("receive")
            if not self.gone.is_set():
                return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await self.at("send status")
        else:
            await self.at("send part" if message.get("more_body") else "send last")
        self.sent.append(message)

    async def run(self) -> None:
        """To its end, whatever that is."""
        self.task = asyncio.create_task(self.pipeline.run(COMPLETIONS, self.scope, self.receive, self.send))
        await asyncio.wait({self.task}, timeout=25)
        assert self.task.done(), "the request hangs"


@contextmanager
def faulty(site: Site, exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every await of the pipeline passes the exchange's points."""
    policies = site.gateway.parts.runtime.current
    parse = pipeline_module.parse
    authenticate, reserve, settle = policies.auth.authenticate, policies.quota.reserve, policies.quota.settle
    prepare = site.gateway.parts.intake.prepare
    batches = Ticket.batches

    def before(point: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            await exchange.at(point)
            return await call(*args, **kwargs)

        return wrapped

    async def counted_reserve(job: Any, now: float) -> Any:
        await exchange.at("reserve, before")
        decision = await reserve(job, now)
        exchange.reserved.append(job.id)
        await exchange.at("reserve, after")
        return decision

    async def counted_settle(job_id: JobId, usage: Usage, now: float) -> Any:
        exchange.settled.append((job_id, usage))
        figures = await settle(job_id, usage, now)
        await exchange.at("settle")
        return figures

    async def watched_batches(ticket: Ticket) -> AsyncIterator[Any]:
        await exchange.at("first token")
        async for batch in batches(ticket):
            await exchange.at("output")
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(policies.auth, "authenticate", before("authenticate", authenticate))
        patch.setattr(policies.quota, "reserve", counted_reserve)
        patch.setattr(policies.quota, "settle", counted_settle)
        patch.setattr(site.gateway.parts.intake, "prepare", before("prepare", prepare))
        patch.setattr(pipeline_module, "parse", before("parse", parse))
        if exchange.point == "settle" and exchange.how != "raises":  # there it waits, and all else settles at once
            patch.setattr(policies.quota, "never_waits", False, raising=False)
        patch.setattr(Ticket, "batches", watched_batches)
        yield


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("how", ["raises", "server cancels", "caller leaves"])
@pytest.mark.parametrize("point", POINTS)
async def test_one_settlement_whatever_fails(
    shared: Site, monkeypatch: pytest.MonkeyPatch, point: str, how: str, stream: bool
) -> None:
    """The reservation is settled exactly once and nothing stays behind, at queue, quota, worker and pipeline."""
    exchange = Exchange(shared, point, how, stream)
    with faulty(shared, exchange, monkeypatch):
        await exchange.run()
        await shared.gateway.parts.pipeline.settler.wait()
    assert exchange.hit or (point == "send part" and not stream)
    assert len(exchange.settled) == (0 if point in HOLDS_NOTHING else 1)
    assert shared.slots("alpha") == 0
    await shared.at_rest()


class Behind(Exchange):
    """Notes what is settled when the last byte is handed over and two turns of the loop later; then the caller goes."""

    def __init__(self, site: Site, stream: bool) -> None:
        super().__init__(site, "nowhere", "raises", stream)
        self.seen: list[int] = []

    async def send(self, message: dict[str, Any]) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body")
        if last:
            self.seen.append(len(self.settled))
            for _ in range(2):
                await asyncio.sleep(0)
            self.seen.append(len(self.settled))
            self.gone.set()
        self.sent.append(message)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_the_last_byte_waits_for_no_settlement_and_no_settlement_for_its_reader(
    shared: Site, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """What is done at once is done right behind the last byte, though nobody takes it; once, though nobody stays."""
    exchange = Behind(shared, stream)
    with faulty(shared, exchange, monkeypatch):
        await exchange.run()
    assert exchange.seen == [0, 1]
    assert len(exchange.settled) == 1
    assert exchange.sent[-1]["body"]
    await shared.at_rest()


async def test_a_reservation_that_has_to_be_waited_for_is_settled_before_the_last_byte(
    shared: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Behind(shared, stream=True)
    monkeypatch.setattr(shared.gateway.parts.runtime.current.quota, "never_waits", False, raising=False)
    with faulty(shared, exchange, monkeypatch):
        await exchange.run()
    assert exchange.seen == [1, 1]
    await shared.at_rest()


@pytest.mark.parametrize("last", [True, False])
async def test_who_is_last_in_a_turn_of_the_loop_is_dispatched_in_it(shared: Site, last: bool) -> None:
    """Unless nobody says so: then others may follow, and the policy chooses among all."""
    exchange = Exchange(shared, "nowhere", "raises", stream=False)
    exchange.scope["extensions"] = {LAST: lambda: last}
    states: list[TicketState] = []

    async def look() -> None:
        states.extend(ticket.state for ticket in tickets(shared))

    running = asyncio.create_task(exchange.run())
    await asyncio.sleep(0)  # it makes the request's task
    looking = asyncio.create_task(look())  # behind that one's first step, before the next turn
    await asyncio.gather(running, looking)
    assert states == [TicketState.RUNNING if last else TicketState.QUEUED]
    await shared.at_rest()
