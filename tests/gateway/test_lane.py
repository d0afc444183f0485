"""Long work in threads: who waits behind whom, and what becomes of work that nobody wants any more."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.lane import ASIDE, SWITCH_S, Lane, hand_over_soon, spare_cores
from workers.tokenizer import INLINE_CHARS

LONG = 2 * INLINE_CHARS


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    made = Lane("test")
    yield made
    await made.close()


class Blocked:
    """Work that keeps the lane's only thread until it is told to end."""

    def __init__(self, lane: Lane, owner: str = "nobody") -> None:
        self.began, self._end = threading.Event(), threading.Event()
        self._task = asyncio.create_task(lane.run(owner, LONG, self._work))

    def _work(self) -> str:
        self.began.set()
        assert self._end.wait(30)
        return "blocked"

    async def started(self) -> None:
        assert await asyncio.to_thread(self.began.wait, 30)

    async def end(self) -> str:
        self._end.set()
        return await self._task


def noted(done: list[str], name: str) -> Callable[[], None]:
    return lambda: done.append(name)


async def test_short_work_runs_here_and_at_once(lane: Lane) -> None:
    blocked = Blocked(lane)
    await blocked.started()
    assert await lane.run("a", INLINE_CHARS, threading.current_thread) is threading.main_thread()
    assert await blocked.end() == "blocked"


async def test_a_flood_waits_behind_itself(lane: Lane) -> None:
    done: list[str] = []
    blocked = Blocked(lane)
    await blocked.started()
    flood = [asyncio.create_task(lane.run("flood", 10 * LONG, noted(done, f"flood {i}"))) for i in range(5)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(lane.run(name, LONG, noted(done, name))) for name in ("b", "c", "b")]
    await asyncio.sleep(0)
    assert len(lane) == 8
    await blocked.end()
    await asyncio.gather(*flood, *others)
    assert done == ["flood 0", "b", "c", "b", "flood 1", "flood 2", "flood 3", "flood 4"]
    assert len(lane) == 0


async def test_turns_go_by_weight(lane: Lane) -> None:
    done: list[str] = []
    blocked = Blocked(lane)
    await blocked.started()
    work = [
        asyncio.create_task(lane.run(name, LONG, noted(done, name), weight=weight))
        for name, weight in (("light", 1.0), ("heavy", 3.0))
        for _ in range(12)
    ]
    await asyncio.sleep(0)
    await blocked.end()
    await asyncio.gather(*work)
    assert done[:12].count("heavy") == 9


async def test_who_was_away_has_no_credit(lane: Lane) -> None:
    done: list[str] = []
    first = Blocked(lane, "busy")
    await first.started()
    second = Blocked(lane, "busy")
    await asyncio.sleep(0)
    await first.end()
    await second.started()
    work = [asyncio.create_task(lane.run("busy", LONG, noted(done, "busy"))) for _ in range(3)]
    await asyncio.sleep(0)
    work += [asyncio.create_task(lane.run("late", LONG, noted(done, "late"))) for _ in range(3)]
    await asyncio.sleep(0)
    await second.end()
    await asyncio.gather(*work)
    assert done == ["late", "busy", "late", "busy", "late", "busy"]


async def test_owners_without_work_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the lane is never idle."""
    monkeypatch.setattr("gateway.lane.MOST_OWNERS", 4)
    lane = Lane("test")
    following = Blocked(lane, "0")
    for number in range(1, 20):
        blocked, following = following, Blocked(lane, str(number))
        await blocked.started()
        await blocked.end()
        assert len(lane._ends) <= 8
    await following.end()
    await lane.close()


async def test_what_nobody_wants_any_more_is_not_done(lane: Lane) -> None:
    done: list[str] = []
    blocked = Blocked(lane)
    await blocked.started()
    gone = asyncio.create_task(lane.run("a", LONG, noted(done, "gone")))
    stays = asyncio.create_task(lane.run("a", LONG, noted(done, "stays")))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert len(lane) == 1
    await blocked.end()
    await stays
    assert done == ["stays"]


async def test_what_was_not_done_is_not_held_against_its_owner(lane: Lane) -> None:
    done: list[str] = []
    blocked = Blocked(lane)
    await blocked.started()
    gone = [asyncio.create_task(lane.run("a", LONG, noted(done, "gone"))) for _ in range(9)]
    others = [asyncio.create_task(lane.run("b", LONG, noted(done, "b"))) for _ in range(3)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    back = asyncio.create_task(lane.run("a", LONG, noted(done, "a")))
    await asyncio.sleep(0)
    await blocked.end()
    await asyncio.gather(back, *others)
    assert done == ["b", "a", "b", "b"]


async def test_a_caller_that_leaves_frees_no_thread_that_still_works(lane: Lane) -> None:
    blocked = Blocked(lane)
    await blocked.started()
    blocked._task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked._task
    done: list[str] = []
    following = asyncio.create_task(lane.run("a", LONG, noted(done, "next")))
    await asyncio.sleep(0)
    assert len(lane) == 1
    blocked._end.set()
    await following
    assert done == ["next"]


async def test_what_the_work_raises_is_its_callers(lane: Lane) -> None:
    def broken() -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        await lane.run("a", LONG, broken)
    assert await lane.run("a", LONG, lambda: 5) == 5


async def test_closing_cancels_what_waits_and_finishes_what_runs() -> None:
    lane = Lane("test")
    blocked = Blocked(lane)
    await blocked.started()
    waits = asyncio.create_task(lane.run("a", LONG, lambda: "never"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(lane.close())
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert await blocked.end() == "blocked"
    await closing


async def test_threads_give_way_to_the_event_loop(lane: Lane) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    here = niceness()
    assert await lane.run("a", LONG, niceness) == (min(19, here + ASIDE) if sys.platform == "linux" else here)


def test_a_core_is_left_to_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (3, 2), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert spare_cores() == threads


def test_the_interpreter_lock_changes_hands_soon() -> None:
    before = sys.getswitchinterval()
    try:
        hand_over_soon()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        sys.setswitchinterval(before)
