"""Ending a block from outside: which word counts, and what others' cancellations become."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.cut import Cut, Deadline


class EndError(Exception):
    """Why a block ended."""


def soon(call: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_soon(call)


async def cut_block(cut: Cut, *calls: Callable[[], object]) -> str:
    with cut:
        for call in calls:
            soon(call)
        await asyncio.sleep(30)
    return "to its end"


async def test_the_first_word_ends_the_block_wherever_it_waits() -> None:
    cut = Cut()
    with pytest.raises(EndError, match="first"):
        await cut_block(cut, lambda: cut(EndError("first")), lambda: cut(EndError("second")))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "nothing of it stays with the task"
    await asyncio.sleep(0)


async def test_words_before_and_after_are_ignored() -> None:
    cut = Cut()
    cut(EndError("early"))
    with cut:
        await asyncio.sleep(0)
    cut(EndError("late"))
    await asyncio.sleep(0)


async def test_an_error_on_the_way_out_is_the_one_that_counts() -> None:
    cut = Cut()

    async def breaks() -> None:
        with cut:
            soon(lambda: cut(EndError()))
            try:
                await asyncio.sleep(30)
            finally:
                raise LookupError

    with pytest.raises(LookupError):
        await breaks()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_work_that_ends_all_the_same_has_ended() -> None:
    cut = Cut()
    with cut:
        soon(lambda: cut(EndError()))
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            done = True
    assert done


@pytest.mark.parametrize("both", [False, True], ids=["alone", "at once"])
async def test_somebody_elses_cancellation_stays_one(both: bool) -> None:
    cut = Cut()
    task = asyncio.create_task(cut_block(cut))
    await asyncio.sleep(0)
    if both:
        cut(EndError())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_time_limit_inside_keeps_its_meaning() -> None:
    cut = Cut()
    with cut:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.sleep(30)
        await asyncio.sleep(0)


async def test_a_block_is_ended_inside_a_time_limit_too() -> None:
    cut = Cut()

    async def limited() -> None:
        with cut:
            soon(lambda: cut(EndError()))
            async with asyncio.timeout(30):
                await asyncio.sleep(30)

    with pytest.raises(EndError):
        await limited()


async def test_a_deadline_rings_until_there_is_none() -> None:
    """Not before its time, also where the loop's timer is early: a clock that stands still holds it off."""
    now, rung, over = [0.0], list[float](), asyncio.Event()

    def due(at: float) -> float | None:
        rung.append(at)
        if len(rung) == 2:
            over.set()
            return None
        return at + 1

    deadline = Deadline(lambda: now[0], 0.001, due)
    await asyncio.sleep(0.02)
    assert not rung
    now[0] = 0.001
    await asyncio.sleep(0.02)
    assert rung == [0.001]
    now[0] = 7.0
    deadline.stop()
    deadline = Deadline(lambda: now[0], 7.0, due)
    async with asyncio.timeout(30):
        await over.wait()
    assert rung == [0.001, 7.0]
    deadline.stop()
