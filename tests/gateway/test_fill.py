"""The loop that fills workers: a job for which others wait keeps only the rooms that it might use."""

from __future__ import annotations

import pytest

from gateway import gate
from gateway.gate import Load, Room, fill
from policies.queue import Dispatch, JobQueue
from policies.scheduling.fcfs import FcfsScheduler
from policies.types import Job, JobId, TenantId, WorkerView


def room(name: str, free: int, **labels: str) -> Room:
    view = WorkerView(
        name, "m", "pool", labels=labels, max_running=8, free_blocks=free, total_blocks=100, block_size=16
    )
    return Room.of(view, [Load(0, 1, started=True)], 512, stale=False)


def job(name: str, prompt: int, **requires: str) -> Job:
    return Job(JobId(name), TenantId(name), "m", prompt, 16, 0.0, requires=requires)


class Turn:
    """Queue and rooms; ``run`` sends what goes."""

    def __init__(self, *rooms: Room) -> None:
        self.queue = JobQueue(FcfsScheduler())
        self.rooms = rooms

    def run(self) -> dict[str, str]:
        sent: dict[str, str] = {}

        def send(dispatch: Dispatch, rooms: list[Room]) -> None:
            fitting = [room for room in rooms if room.fits(dispatch.job, 1, suspect=False)]
            sent[dispatch.job.id] = fitting[0].reported.name
            fitting[0].take(dispatch.job, 1, suspect=False)

        fill(
            self.queue,
            self.rooms,
            1.0,
            claim=lambda job: (1, False),
            could_fit=lambda job: any(room.matches(job) for room in self.rooms),
            send=send,
        )
        return sent


def test_a_large_job_is_overtaken_once_then_the_others_wait_for_it() -> None:
    turn = Turn(room("w", free=10))
    turn.queue.offer(job("large", 320), 0.0)
    for name in ("first", "second", "third"):
        turn.queue.offer(job(name, 16), 0.0)
    assert turn.run() == {"first": "w"}
    turn.rooms = (room("w", free=30),)
    assert next(iter(turn.run())) == "large"


def test_a_room_that_the_held_job_cannot_use_takes_others_meanwhile() -> None:
    """Two pools: a job that waits for the one does not keep the other from working."""
    turn = Turn(room("cpu", free=10, hardware="cpu"), room("gpu", free=10, hardware="gpu"))
    turn.queue.offer(job("large", 320, hardware="gpu"), 0.0)
    for name in ("a", "b", "c"):
        turn.queue.offer(job(name, 32), 0.0)
    sent = turn.run()
    assert "large" not in sent
    assert len(sent) == 3
    assert [sent[name] for name in list(sent)[1:]] == ["cpu", "cpu"], "once it is held, its pool is its own"


def test_a_held_job_that_can_run_nowhere_any_more_holds_nobody() -> None:
    turn = Turn(room("gpu", free=10, hardware="gpu"))
    turn.queue.offer(job("large", 320, hardware="gpu"), 0.0)
    turn.queue.offer(job("a", 16), 0.0)
    turn.queue.offer(job("b", 16), 0.0)
    assert list(turn.run()) == ["a"]
    turn.rooms = (room("cpu", free=10, hardware="cpu"),)
    assert list(turn.run()) == ["b"]


def test_a_worker_with_a_line_gets_what_fills_it_however_many_turns_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report of step 7 shows one of two in line; what is sent afterwards is in no report before that of step 9."""
    monkeypatch.setattr(gate, "MAX_WAITING", 2)
    view = WorkerView("w", "m", "p", max_running=8, waiting=1, free_blocks=50, total_blocks=100, block_size=16)
    loads = [Load(0, 1, started=True)]
    sent = []
    for step in (7, 7, 7, 8):
        turn = Turn(Room.of(view, loads, 512, stale=False, step=step))
        for number in range(3):
            turn.queue.offer(job(f"{len(sent)}-{number}", 16), 0.0)
        went = turn.run()
        loads.extend(Load(16, 1, started=False, sent_step=step) for _ in went)
        sent.extend(went)
    assert len(sent) == 1
    assert Room.of(view, loads, 512, stale=False, step=9).line == 1, "by then the report says itself who waits"
