"""Who is let in when callers go at the worst moments."""

from __future__ import annotations

import asyncio

import pytest

from tests.workers.rpc.talk import HELLO
from workers.protocol import Cancel, Down, Generate, encode, joined
from workers.rpc.reception import Reception
from workers.rpc.transport import Desk
from workers.rpc.wire import cancel_all

pytestmark = pytest.mark.timeout(60)


class Caller:
    """One whose talk ends when the test says so, though it was cancelled."""

    def __init__(self) -> None:
        self.talking, self.ending, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.desk: Desk | None = None

    async def let_in(self) -> None:
        return

    async def greet(self, hello: bytes) -> None:
        assert hello == encode(HELLO)

    async def talk(self, desk: Desk) -> None:
        self.desk = desk
        self.talking.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.may_end.wait()

    def news(self) -> None:
        return


async def test_a_connection_that_is_lost_while_it_is_replaced_locks_nobody_out() -> None:
    """Its session is closed all the same: the next gateway waits for that, and so would every later one."""
    heard: list[Down] = []
    reception = Reception(heard.append, None)
    reception.open()
    reception.ready(HELLO)
    old, new = Caller(), Caller()
    first = asyncio.create_task(reception.serve(old))
    await asyncio.wait_for(old.talking.wait(), 30)
    assert old.desk is not None
    old.desk.heard(joined([encode(Generate("a", [1], 4))]))
    second = asyncio.create_task(reception.serve(new))
    await asyncio.wait_for(old.ending.wait(), 30)
    first.cancel()
    await asyncio.sleep(0)
    assert not new.talking.is_set(), "two sessions at once"
    old.may_end.set()
    await asyncio.wait({first}, timeout=30)
    assert first.cancelled()
    assert heard == [Generate("a", [1], 4), Cancel("a")]
    reception.outbox._orphans.clear()  # the engine has let go of it
    await asyncio.wait_for(new.talking.wait(), 30)
    new.may_end.set()
    await cancel_all(second)
    assert not reception.connected


async def test_what_is_cancelled_has_ended_though_who_waits_is_cancelled() -> None:
    may_end = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    work = asyncio.create_task(slow())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(cancel_all(work))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    may_end.set()
    await asyncio.wait({waiting}, timeout=30)
    assert waiting.cancelled()
    assert work.cancelled()
