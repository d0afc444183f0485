"""A scheduling policy that works until it is told to fail, in any of the ways in which a policy can."""

from __future__ import annotations

from typing import Any

from policies.scheduling.fcfs import FcfsScheduler
from policies.spi import Fits
from policies.testing import make_job
from policies.types import Charge, Job, JobId, Pick

CALLS = ("push", "pop", "requeue", "discard", "charge", "explain", "expired", "next_expired", "dump")
LIES = ("makes up a job", "loses a job", "ignores fits", "denies a job", "explains nothing", "keeps what it popped")
WITHHOLDS = "withholds jobs"
"""Seen only after a while (``policies.guard.STALL_S``), so it is none of ``WAYS``."""
WAYS = (*(f"{call} raises" for call in CALLS), *(f"{call} works and raises" for call in CALLS), *LIES)


class FaultyError(RuntimeError):
    """What it raises."""


class Faulty(FcfsScheduler):
    """``way``: one of ``WAYS``, ``WITHHOLDS``, or None while it behaves."""

    def __init__(self, way: str | None = None) -> None:
        super().__init__()
        self.way = way
        self.charged = Charge()

    def _do(self, call: str, work: Any) -> Any:
        if self.way == f"{call} raises":
            raise FaultyError(call)
        result = work()
        if self.way == f"{call} works and raises":
            raise FaultyError(call)
        return result

    def push(self, job: Job, now: float) -> None:
        self._do("push", lambda: super(Faulty, self).push(job, now))

    def requeue(self, job: Job, now: float, reason: Any) -> None:
        self._do("requeue", lambda: super(Faulty, self).requeue(job, now, reason))

    def pop(self, now: float, fits: Fits) -> Job | None:
        if self.way == WITHHOLDS:
            return None
        if self.way == "makes up a job":
            return make_job("made up")
        if self.way == "ignores fits":
            fits = _anything
        if self.way == "loses a job" and len(self):
            super().pop(now, _anything)
            return None
        if self.way == "keeps what it popped" and len(self):
            job = super().pop(now, fits)
            if job is not None:
                super().push(job, now)
            return job
        popped: Job | None = self._do("pop", lambda: super(Faulty, self).pop(now, fits))
        return popped

    def discard(self, job_id: JobId) -> bool:
        if self.way == "denies a job":
            return False
        found: bool = self._do("discard", lambda: super(Faulty, self).discard(job_id))
        return found

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        def book() -> None:
            self.charged += charge

        self._do("charge", book)

    def explain(self, job: Job) -> Pick:
        if self.way == "explains nothing":
            return None  # type: ignore[return-value]
        pick: Pick = self._do("explain", lambda: super(Faulty, self).explain(job))
        return pick

    def expired(self, now: float) -> list[Job]:
        jobs: list[Job] = self._do("expired", list)
        return jobs

    def next_expired(self) -> float | None:
        self._do("next_expired", list)
        return None

    def dump(self) -> dict[str, Any]:
        state: dict[str, Any] = self._do("dump", dict)
        return state


def _anything(job: Job) -> bool:
    return True
