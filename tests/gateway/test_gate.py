"""The gate's arithmetic: what a worker can still take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.gate import MAX_WAITING, Load, Room, fill
from policies.queue import Dispatch, JobQueue
from policies.scheduling.fcfs import FcfsScheduler
from policies.types import Job, JobId, TenantId, WorkerView


def view(**values: Any) -> WorkerView:
    return WorkerView(
        "w", "m", "p", **{"max_running": 4, "free_blocks": 100, "total_blocks": 100, "block_size": 16, **values}
    )


def job(prompt: int = 10, **values: Any) -> Job:
    return Job(JobId("j"), TenantId("t"), "m", prompt, 5, 0.0, **values)


def running(count: int) -> list[Load]:
    return [Load(0, 1, started=True) for _ in range(count)]


def taken(room: Room, what: Job, limit: int = 1000) -> int:
    """How many such jobs go in."""
    count = 0
    while count < limit and room.fits(what, 1, suspect=False):
        room.take(what, 1, suspect=False)
        count += 1
    return count


def test_slots_and_a_line() -> None:
    assert taken(Room.of(view(), [], 512, stale=False), job()) == 4 + MAX_WAITING
    assert taken(Room.of(view(), running(4), 512, stale=False), job()) == MAX_WAITING
    assert taken(Room.of(view(), running(6), 512, stale=False), job()) == 0, "two of six were preempted: they wait"
    assert MAX_WAITING == 1, "more, and a victim of a flood waits for more than two slots (tests/e2e/test_fairness.py)"


def test_prompts_beyond_the_next_steps_budget_count_as_waiting() -> None:
    """Sixteen tokens a step: the first prompt starts, the others would wait in the engine."""
    assert taken(Room.of(view(max_running=8), [], 16, stale=False), job(100)) == 1 + MAX_WAITING
    prefilling = [Load(84, 1, started=False), Load(100, 1, started=False)]
    assert taken(Room.of(view(max_running=8), prefilling, 16, stale=False), job(100)) == MAX_WAITING - 1


def test_a_reported_line_is_filled_up_and_no_more() -> None:
    assert taken(Room.of(view(waiting=MAX_WAITING), running(1), 512, stale=False), job()) == 0
    assert taken(Room.of(view(waiting=2), running(1), 512, stale=False), job()) == 0
    assert taken(Room.of(view(waiting=2), running(1), 512, stale=True), job()) == 3 + MAX_WAITING, "stale: not believed"


def test_blocks_must_hold_the_prompt_and_a_first_block_of_output() -> None:
    assert Room.of(view(free_blocks=2), running(1), 512, stale=False).fits(job(31), 1, suspect=False)
    assert not Room.of(view(free_blocks=2), running(1), 512, stale=False).fits(job(32), 1, suspect=False)
    assert Room.of(view(free_blocks=2), running(1), 512, stale=True).fits(job(32), 1, suspect=False)
    assert taken(Room.of(view(free_blocks=3), running(1), 512, stale=False), job(10)) == 3


def test_an_idle_worker_takes_anything_that_it_may_run() -> None:
    """Else a job that fits no figures would wait for ever; the engine refuses what is really too large."""
    assert Room.of(view(free_blocks=0), [], 16, stale=False).fits(job(5000), 9, suspect=False)
    assert not Room.of(view(), [], 16, stale=False).fits(job(requires={"gpu": "yes"}), 1, suspect=False)
    assert Room.of(view(labels={"gpu": "yes"}), [], 16, stale=False).fits(
        job(requires={"gpu": "yes"}), 1, suspect=False
    )


def test_a_job_goes_only_where_its_context_holds_it() -> None:
    """Ten in the prompt and five of output: a small worker would refuse what a larger one can run."""
    small, large = (Room.of(view(), [], 512, stale=False, longest=longest) for longest in (14, 15))
    assert not small.fits(job(), 1, suspect=False)
    assert not small.matches(job())
    assert large.fits(job(), 1, suspect=False)
    assert small.fits(job(), 5, suspect=False), "one token for each of five choices"
    assert Room.of(view(), running(1), 512, stale=True, longest=15).fits(job(), 1, suspect=False)
    assert not Room.of(view(), running(1), 512, stale=True, longest=14).fits(job(), 1, suspect=False)


def test_one_suspect_at_a_time() -> None:
    room = Room.of(view(), [], 512, stale=False)
    room.take(job(), 1, suspect=True)
    assert not room.fits(job(), 1, suspect=True)
    assert room.fits(job(), 1, suspect=False)
    there = [Load(10, 1, started=True, suspect=True)]
    assert not Room.of(view(), there, 512, stale=False).fits(job(), 1, suspect=True)


def test_choices_need_their_slots_together() -> None:
    room = Room.of(view(), running(2), 512, stale=False)
    assert room.fits(job(), 2, suspect=False)
    assert room.fits(job(), 2 + MAX_WAITING, suspect=False), "in the line"
    assert not room.fits(job(), 3 + MAX_WAITING, suspect=False)


@given(
    loads=st.lists(st.builds(Load, st.integers(0, 400), st.integers(1, 3), st.booleans()), max_size=12),
    waiting=st.integers(0, 6),
    budget=st.integers(1, 512),
    prompts=st.lists(st.integers(1, 300), max_size=30),
)
def test_never_more_than_the_line_waits(loads: list[Load], waiting: int, budget: int, prompts: list[int]) -> None:
    """Whatever is in flight: what is taken and cannot start at once never exceeds what the line had left."""
    room = Room.of(view(waiting=waiting, free_blocks=10_000), loads, budget, stale=False)
    idle, slots, tokens, before = room.idle, room.slots, room.budget, room.line
    line = 0
    for prompt in prompts:
        what = job(prompt)
        if not room.fits(what, 1, suspect=False):
            continue
        room.take(what, 1, suspect=False)
        if slots >= 1 and tokens > 0:
            slots, tokens = slots - 1, tokens - prompt
        else:
            line += 1
    assert line <= max(0, before) or idle
    if waiting >= MAX_WAITING and loads:
        assert line == 0


@pytest.mark.parametrize("stale", [True, False])
def test_what_is_taken_shows_in_the_view(stale: bool) -> None:
    """Routing sees the dispatches of its own turn."""
    room = Room.of(view(), [], 512, stale=stale)
    room.take(job(40), 2, suspect=False)
    assert (room.view.inflight, room.view.inflight_tokens, room.view.free_blocks) == (2, 45, 96)


class Filling:
    """``fill`` over a queue of many tenants; counts what the policy is made to ask."""

    def __init__(self, jobs: list[Job]) -> None:
        self.queue = JobQueue(FcfsScheduler())
        for one in jobs:
            self.queue.offer(one, 0.0)
        self.asked = 0
        self.sent: list[str] = []

    def go(self, *rooms: Room) -> int:
        """Jobs sent."""
        before = len(self.sent)

        def may(job: Job, room: Room) -> bool:
            return True

        def claim(job: Job) -> tuple[int, bool]:
            self.asked += 1
            return 1, False

        def send(dispatch: Dispatch, among: list[Room]) -> None:
            self.sent.append(dispatch.job.id)
            next(room for room in among if room.fits(dispatch.job, 1, suspect=False)).take(
                dispatch.job, 1, suspect=False
            )

        fill(self.queue, rooms, 0.0, claim=claim, could_fit=lambda job: True, send=send, may=may)
        return len(self.sent) - before


def many(count: int, prompt: int = 100, **values: Any) -> list[Job]:
    return [Job(JobId(f"j{i}"), TenantId(f"t{i}"), "m", prompt + i % 7, 5, 0.0, **values) for i in range(count)]


def full(blocks: int, **values: Any) -> Room:
    return Room.of(view(free_blocks=blocks, **values), running(1), 512, stale=False)


def test_no_tenant_is_asked_about_when_the_shortest_prompt_finds_no_room() -> None:
    filling = Filling(many(1000))
    assert filling.go(full(6)) == 0
    assert filling.asked == 0
    assert filling.go(full(7)) == 1
    assert filling.sent == ["j0"]


def test_nor_when_the_job_for_whom_others_wait_does_not_fit() -> None:
    large = Job(JobId("large"), TenantId("large"), "m", 1000, 5, 0.0)
    filling = Filling([large, *many(1000)])
    assert filling.go(full(7)) == 1, "it is overtaken once"
    filling.asked = 0
    assert filling.go(full(20)) == 0
    assert filling.asked <= 4, "about the one that is held"
    assert filling.go(full(64), full(7)) >= 1
    assert filling.sent[1] == "large"


def test_nor_when_the_free_worker_s_pool_takes_none_of_them() -> None:
    filling = Filling(many(1000, requires={"hardware": "gpu"}))
    idle = Room.of(view(), [], 512, stale=False)
    kept = Room.of(view(classes=frozenset({"batch"})), [], 512, stale=False)
    assert filling.go(idle, kept) == 0
    assert filling.asked == 0
    fits = Room.of(view(labels={"hardware": "gpu"}), [], 512, stale=False)
    assert filling.go(idle, fits) == 4 + MAX_WAITING


def adapted(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"adapter": name, "adapter_digest": name * 2}


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from(["a", "b"]), st.booleans(), st.sampled_from([None, "x", "y"])),
        max_size=12,
    ),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["", "a", "b"]), st.integers(0, 5)), max_size=3),
)
def test_asking_less_changes_nothing(
    jobs: list[tuple[int, str, bool, str | None]], rooms: list[tuple[int, str, int]]
) -> None:
    """With and without the short cut the same jobs go."""
    made = [
        Job(
            JobId(f"j{i}"),
            TenantId(f"t{i % 4}"),
            "m",
            prompt,
            5,
            0.0,
            service_class=name,
            allow_external=external,
            **adapted(adapter),
        )
        for i, (prompt, name, external, adapter) in enumerate(jobs)
    ]

    def places() -> list[Room]:
        return [
            Room.of(
                view(
                    free_blocks=blocks,
                    classes=frozenset({name} if name else ()),
                    labels={"external": "true"} if n else {},
                    adapters=frozenset({"xx"} if used % 2 else ()),
                ),
                running(used),
                64,
                stale=False,
            )
            for n, (blocks, name, used) in enumerate(rooms)
        ]

    short, long = Filling(made), Filling(made)
    short.go(*places())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Room, "might", lambda self, least: True)
        long.go(*places())
    assert short.sent == long.sent
