"""A time limit that costs nothing where nothing waits, and is a time limit where something does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.within import within


async def test_what_answers_at_once_makes_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: float) -> Any:
        raise AssertionError("a timer was made")

    monkeypatch.setattr(asyncio, "timeout", refuse)

    async def at_once() -> int:
        return 7

    assert await within(1.0, at_once()) == 7


async def test_what_waits_gets_what_it_waits_for() -> None:
    async def waits() -> list[int]:
        return [await asyncio.sleep(0.001, result=number) for number in range(3)]

    assert await within(5.0, waits()) == [0, 1, 2]


async def test_what_waits_too_long_ends() -> None:
    ended: list[str] = []

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    with pytest.raises(TimeoutError):
        await within(0.01, hangs())
    assert ended == ["cleaned up"]


@pytest.mark.parametrize("pause", [False, True])
async def test_its_errors_are_its_own(pause: bool) -> None:
    async def fails() -> None:
        if pause:
            await asyncio.sleep(0)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await within(5.0, fails())


async def test_an_error_of_what_it_waits_for_reaches_it() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def asks() -> str:
        try:
            return str(await future)
        except LookupError:
            return "told"

    asyncio.get_running_loop().call_soon(future.set_exception, LookupError())
    assert await within(5.0, asks()) == "told"


async def test_cancelling_the_caller_cancels_it() -> None:
    """And it may still wait while it cleans up."""
    seen: list[str] = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("cancelled")
            raise

    task = asyncio.create_task(within(5.0, works()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]


async def test_an_inner_time_limit_is_its_own() -> None:
    """``asyncio.timeout`` inside runs out inside."""

    async def tries() -> str:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            return "inner"
        return "none"

    assert await within(5.0, tries()) == "inner"
