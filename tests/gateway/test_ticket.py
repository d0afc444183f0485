"""A ticket's life: once queued, run, ended; what its reader gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.choices import ChoiceDelta
from gateway.errors import ApiError, unavailable
from gateway.intake import Prepared
from gateway.pool import WorkerHandle
from gateway.ticket import Ticket, TicketState
from policies.types import Job, JobId, TenantId
from workers.protocol import Generate


def ticket(stream: bool = True) -> Ticket:
    job = Job(JobId("j"), TenantId("t"), "m", 3, 8, 0.0)
    nothing: Any = None
    return Ticket(
        Prepared(job, Generate(id="j", tokens=[1, 2, 3], max_tokens=8), nothing, nothing), now=0.0, stream=stream
    )


def handle() -> WorkerHandle:
    return WorkerHandle("w", model="m", pool="p", labels={}, incarnation=1, clock=lambda: 0.0)


def text(value: str) -> ChoiceDelta:
    return ChoiceDelta(0, value, billed=1)


async def read(what: Ticket) -> list[list[str]]:
    return [[delta.text for delta in batch] async for batch in what.batches()]


async def test_a_slow_reader_gets_what_piled_up_in_one_batch() -> None:
    it = ticket()
    it.dispatched(handle(), 1.0)
    it.push(text("a"))
    it.push(text("b"))
    batches = it.batches()
    assert [delta.text for delta in await anext(batches)] == ["a", "b"]
    it.push(text("c"))
    it.finish(None, 2.0)
    assert [[delta.text for delta in batch] async for batch in batches] == [["c"]]


async def test_without_a_stream_there_is_one_batch_at_the_end() -> None:
    it = ticket(stream=False)
    it.dispatched(handle(), 1.0)
    it.push(text("a"))
    reader = asyncio.create_task(read(it))
    await asyncio.sleep(0)
    assert not it.committed
    it.push(text("b"))
    it.finish(None, 2.0)
    assert await reader == [["a", "b"]]


async def test_it_ends_once() -> None:
    it = ticket()
    assert it.finish(unavailable("first", "first"), 1.0)
    assert not it.finish(None, 2.0)
    assert it.error is not None
    assert (it.error.code, it.finished_at, it.state) == ("first", 1.0, TicketState.DONE)
    it.push(text("late"))
    with pytest.raises(ApiError, match="first"):
        await read(it)


async def test_an_error_before_the_first_byte_hides_what_was_buffered() -> None:
    """The caller gets the status, not half an answer with a 200."""
    it = ticket()
    it.dispatched(handle(), 1.0)
    it.push(text("a"))
    it.finish(unavailable("lost", "lost"), 2.0)
    with pytest.raises(ApiError):
        await anext(it.batches())


async def test_an_error_after_the_first_byte_comes_last() -> None:
    it = ticket()
    it.dispatched(handle(), 1.0)
    it.push(text("a"))
    batches = it.batches()
    await anext(batches)
    it.push(text("b"))
    it.finish(unavailable("lost", "lost"), 2.0)
    assert [delta.text for delta in await anext(batches)] == ["b"]
    with pytest.raises(ApiError):
        await anext(batches)


async def test_going_back_to_the_queue_voids_what_nobody_saw() -> None:
    it = ticket()
    it.dispatched(handle(), 1.0)
    assert it.produced(1.5)
    it.push(text("void"))
    it.requeued()
    assert (it.state, it.first_token_at, it.worker) == (TicketState.QUEUED, None, None)
    it.dispatched(handle(), 2.0)
    assert it.produced(2.5)
    assert not it.produced(2.6)
    it.push(text("real"))
    it.finish(None, 3.0)
    assert await read(it) == [["real"]]


async def test_what_a_caller_has_is_never_repeated() -> None:
    """security 77."""
    it = ticket()
    it.dispatched(handle(), 1.0)
    it.push(text("a"))
    await anext(it.batches())
    assert it.committed
    with pytest.raises(AssertionError):
        it.requeued()


async def test_whoever_waits_is_woken_by_the_end() -> None:
    it = ticket()
    waits = [asyncio.create_task(wait()) for wait in (it.wait_first, it.wait_done)]
    await asyncio.sleep(0)
    it.finish(unavailable("over", "over"), 1.0)
    await asyncio.wait_for(asyncio.gather(*waits), 30)
