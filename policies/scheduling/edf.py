"""``edf``: earliest deadline first, with floors for classes, giving up what cannot make its deadline any more.

Source: Liu, Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment" (1973); giving up
what is late, so that an overload does not make everybody late: Haritsa, Carey, Livny, "Earliest Deadline Scheduling
for Real-Time Database Systems" (1991).

Rules
- A job's deadline is its own, else arrival + ``max_wait_s`` of its class, else arrival + ``default_s``. It is the time
  at which its first token is wanted. A caller may loosen it, never tighten it (the gateway's intake sees to that).
- A job that has a deadline of its own is given up once even an immediate start would be too late: deadline − what comes
  before the first token (``startup_s`` + prompt ÷ ``prefill_tokens_per_s``). The queue core removes it and tells its
  caller. A returned job is not given up: it was dispatched in time once.
- A class with a floor gets that part of the service while it waits (``_floors.py``): loose deadlines do not starve
  behind tight ones that keep coming.
- Deadlines alone keep everybody from starving: a job is overtaken by later ones only until its own deadline is the
  earliest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pydantic import Field, field_validator

from policies.scheduling._floors import Floors
from policies.scheduling._keyed import KeyedHeads, Line
from policies.scheduling._lengths import Lengths, PredictingConfig
from policies.scheduling._ranking import Ranking
from policies.scheduling._tariff import Prepaid
from policies.spi import Fits, Json, PolicyContext, PolicySpec
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

Flow = tuple[str, TenantId]


class EdfConfig(PredictingConfig):
    """What comes before a first token, floors of classes, and cost per token (for the floors only)."""

    startup_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    prefill_tokens_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    default_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    floors: dict[str, float] = Field(default_factory=dict)
    """Class → its part of the service while it waits."""

    @field_validator("floors")
    @classmethod
    def _add_up(cls, floors: dict[str, float]) -> dict[str, float]:
        return check_floors(floors)


def check_floors(floors: dict[str, float]) -> dict[str, float]:
    """Raises ValueError unless each is in (0, 1] and all together are at most 1."""
    for name, share in floors.items():
        if not 0 < share <= 1:
            raise ValueError(f"floor of {name!r} must be above 0 and at most 1, got {share}")
    if sum(floors.values()) > 1 + 1e-9:
        raise ValueError(f"floors add up to {sum(floors.values()):g}; together they can be at most 1")
    return floors


class _Heads(KeyedHeads[Flow]):
    """Heads by deadline over all classes, and once more within each class that has a floor."""

    def __init__(self, floored: list[str]) -> None:
        super().__init__()
        self._classes: dict[str, Ranking[Line[Flow]]] = {name: Ranking() for name in floored}

    def first_of(self, name: str, accept: Callable[[Job], bool]) -> Line[Flow] | None:
        """The first line of one floored class whose head is accepted."""
        return self._classes[name].first(lambda line: accept(line.heap[0][2]))

    def waits(self, name: str) -> bool:
        """Whether a floored class has queued jobs."""
        return len(self._classes[name]) > 0

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival."""
        for ranking in self._classes.values():
            ranking.clear()
        return super().drain()

    def _ranked(self, line: Line[Flow]) -> None:
        super()._ranked(line)
        ranking = self._classes.get(line.key[0])
        if ranking is None:
            return
        if line.heap:
            ranking.set(line, line.heap[0][4])
        else:
            ranking.remove(line)


class EdfScheduler:
    """O(log n) per operation. A ``policies.spi.Expiring``."""

    def __init__(self, config: EdfConfig) -> None:
        self._config = config
        self._floored = bool(config.floors)
        self._queue = _Heads(list(config.floors))
        self._late: list[tuple[float, int, Job]] = []
        """When it is too late for a job, in order; those that are not in line any more are dropped later."""
        self._serial = 0
        self._floors: Floors[str] = Floors()
        for name, share in config.floors.items():
            self._floors.grant(name, share)
        self._paid = Prepaid(config.tariff())
        self._lengths: Lengths = config.lengths()
        self._pick: tuple[Job, str, int, float] | None = None

    def push(self, job: Job, now: float) -> None:
        """O(log n)."""
        deadline = job.deadline
        self._queue.push((job.service_class, job.tenant), job, self._deadline(job) if deadline is None else deadline)
        if deadline is not None:
            self._serial = serial = self._serial + 1
            late = self._late
            heapq.heappush(late, (self._latest_start(job, deadline), serial, job))
            if len(late) > 2 * len(self._queue) + 64:
                late[:] = [item for item in late if self._queue.lines.is_new(item[2])]
                heapq.heapify(late)
        if self._floored:
            self._mark(job.service_class)

    def pop(self, now: float, fits: Fits) -> Job | None:
        """O(log n) and one ``fits`` per tenant and class whose head does not fit."""
        line, due = self._first_due(fits) if self._floored else (None, "")
        if line is None:
            line, due = self._queue.first(fits), ""
            if line is None:
                return None
        queued = len(self._queue)
        job = self._queue.pop(line)
        if self._floored:
            cost = self._paid.take(job, self._lengths.begin(job))
            self._floors.serve(job.service_class, cost, ordinary=not due)
            self._mark(job.service_class)
        self._pick = (job, due, queued, now)
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """First of its tenant and class. It is not given up any more."""
        self._queue.push_front((job.service_class, job.tenant), job, self._deadline(job))
        self._mark(job.service_class)

    def discard(self, job_id: JobId) -> bool:
        """O(log n)."""
        job = self._queue.discard(job_id)
        if job is None:
            return False
        if self._floored:
            self._lengths.forget(job_id)
            self._floors.serve(job.service_class, -self._paid.refund(job_id))
            self._mark(job.service_class)
        return True

    def expired(self, now: float) -> list[Job]:
        """Jobs for which it is too late, none removed yet."""
        late: list[Job] = []
        while self._late and self._late[0][0] < now:
            job = heapq.heappop(self._late)[2]
            if self._queue.lines.is_new(job):
                late.append(job)
        return late

    def next_expired(self) -> float | None:
        """When it is too late for the next one."""
        while self._late and not self._queue.lines.is_new(self._late[0][2]):
            heapq.heappop(self._late)
        return self._late[0][0] if self._late else None

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """Only floors look at service."""
        if self._floored:
            self._lengths.note(job, charge.output, final)
            self._floors.serve(job.service_class, self._paid.settle(job, charge, final))

    def drain(self) -> list[Job]:
        """In order of arrival."""
        self._late.clear()
        jobs = self._queue.drain()
        for name in self._config.floors:
            self._mark(name)
        return jobs

    def dump(self) -> Json:
        """Credits of the floors, what is prepaid, what was learnt."""
        return {"floors": self._floors.dump(), **self._paid.dump(), "lengths": self._lengths.dump()}

    def load(self, state: Json) -> None:
        """Replace them. Raises ValueError when malformed."""
        if not self._floored:
            return
        self._lengths.load(state)
        self._paid.load(state)
        self._floors.load(state.get("floors", {}), {name: name for name in self._config.floors})

    def explain(self, job: Job) -> Pick:
        """How much time it has."""
        if self._pick is None or self._pick[0].id != job.id:
            return Pick("not picked last")
        _, due, queued, now = self._pick
        why = f"floor of class {due[:80]} is due" if due else f"earliest deadline of {queued} queued that fits"
        return Pick(f"{why}, {self._deadline(job) - now:.1f} s left")

    def __len__(self) -> int:
        return len(self._queue)

    def _first_due(self, fits: Fits) -> tuple[Line[Flow] | None, str]:
        for due in self._floors.due():
            line = self._queue.first_of(due, fits)
            if line is not None:
                return line, due
        return None, ""

    def _deadline(self, job: Job) -> float:
        if job.deadline is not None:
            return job.deadline
        return job.arrived_at + (self._config.default_s if job.max_wait_s is None else job.max_wait_s)

    def _latest_start(self, job: Job, deadline: float) -> float:
        rate = self._config.prefill_tokens_per_s
        return deadline - self._config.startup_s - (job.prompt_tokens / rate if rate else 0.0)

    def _mark(self, name: str) -> None:
        if name in self._config.floors:
            self._floors.wait(name, self._queue.waits(name))


def _make(config: EdfConfig, ctx: PolicyContext) -> EdfScheduler:
    return EdfScheduler(config)


SPEC = PolicySpec(
    "scheduling", "edf", EdfConfig, _make, "Earliest deadline first; gives up what is too late; floors for classes."
)
