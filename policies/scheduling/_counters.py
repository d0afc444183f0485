"""What schedulers by service ÷ weight share: a line and a counter per tenant, paid at dispatch, corrected by reports.

Rules
- A tenant's counter grows by cost ÷ weight: at dispatch by what the job is expected to cost, afterwards by the
  difference to what ran. All of a job's changes add up to the tariff of what ran.
- A tenant that comes back from idle is lifted to ``_floor()``: idling earns no credit. Nobody is ever lowered.
- Who goes next is the head of the waiting tenant with the smallest ``_rank``. A subclass decides rank and floor.
- Counters of idle tenants at or below the floor are forgotten: on return they would be lifted there anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, cast

from policies.scheduling._dumps import is_number, read_service
from policies.scheduling._lengths import Lengths, Predict
from policies.scheduling._lines import Lines, Seat
from policies.scheduling._ranking import Places
from policies.scheduling._tariff import Prepaid, Tariff
from policies.spi import Fits, Json
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

IDLE_KEPT = 4096
"""Counters that are kept before those of idle tenants are looked through."""


_HOOKS = ("_rank", "_counted", "_picked")


class SeatLines(Protocol):
    """Lines that stand in their tenants' seats (``Seat.line``)."""

    def pop_if(self, seat: Seat, now: float, fits: Fits) -> Job | None:
        """Remove and return the job that goes next of a seat with a line, if it fits; with the last one, its line."""
        ...


class TenantLines(SeatLines, Protocol):
    """Queued jobs, one line per tenant; ``_lines.Lines`` says what each method does."""

    def push(self, job: Job, now: float) -> bool:
        """True when the tenant's line opens or its head changed. Raises ValueError for an id that is queued."""
        ...

    def push_front(self, job: Job, now: float, reason: RequeueReason) -> bool:
        """True when the tenant's line opens or its head changed. Raises ValueError likewise."""
        ...

    def discard(self, job_id: JobId) -> Job | None: ...
    def drain(self) -> list[Job]: ...

    @property
    def open(self) -> Mapping[TenantId, Any]:
        """What stands in the seat of each tenant with queued jobs; always the same object."""
        ...

    def __len__(self) -> int: ...


class CounterScheduler(ABC):
    """O(log tenants) per operation, and one ``fits`` per head that does not fit."""

    __slots__ = (
        "_last_left", "_lengths", "_lines", "_paid", "_pick", "_plain", "_repeats", "_resumed", "_sweep_at", "_weights",
        "_whose", "seats", "waiting",
    )  # fmt: skip

    any_lines = True
    """Whether it works over any lines: it ranks tenants without looking at their jobs."""
    any_members = False
    """Whether it works for any ``whose``: it looks at no job's tenant or weight, nor at payments as a whole."""

    def __init__(
        self,
        tariff: Tariff,
        lengths: Lengths | None = None,
        *,
        lines: TenantLines | None = None,
        paid: Prepaid | None = None,
    ) -> None:
        """``lengths``: predicts output; None: only the prompt is paid at dispatch. ``paid``: may be shared."""
        self._lines: TenantLines = Lines() if lines is None else lines
        self._paid = Prepaid(tariff) if paid is None else paid
        self._lengths = Lengths("none") if lengths is None else lengths
        self.seats: dict[TenantId, Seat] = {}
        """To read, as the next."""
        self.waiting: Places[Seat] = Places()
        """The seats with queued jobs."""
        self._last_left: TenantId | None = None
        self._resumed: set[TenantId] = set()
        self._sweep_at = IDLE_KEPT
        self._plain = _plain(type(self))
        self._repeats = False
        self._pick: list[Any] = [None, 0.0]  # the job last popped, its tenant's counter then
        self._whose: Callable[[Job], TenantId] | None = None
        self._weights: Mapping[TenantId, float] | None = None

    def over(self, lines: TenantLines) -> None:
        """Keep the tenants' jobs in ``lines`` from now on. Only while it has none."""
        self._lines = lines

    @property
    def paid(self) -> Prepaid:
        """What is paid for jobs that run."""
        return self._paid

    def pay_from(self, paid: Prepaid, *, repeats: bool = False) -> None:
        """What is paid is kept there from now on; ``repeats``: by another, asked before, who pays the same for all."""
        self._paid, self._repeats = paid, repeats

    @property
    def repeats(self) -> bool:
        """Whether another pays, and this one only counts what that said."""
        return self._repeats

    @property
    def predicts(self) -> Predict:
        """How output is predicted."""
        return self._lengths.predict

    @property
    def learns(self) -> bool:
        """Whether it predicts output from what ran."""
        return self._lengths.learns

    def among(
        self,
        whose: Callable[[Job], TenantId],
        weights: Mapping[TenantId, float],
        lines: SeatLines,
        like: CounterScheduler,
    ) -> None:
        """Share among members from now on, who take the place of tenants. Only while it has no jobs, and if it may.

        ``whose`` job it is, in place of its tenant; ``weights`` in place of the job's, 1 where there is none. Jobs come
        and go by ``lines`` only: what of this class looks a job up or counts jobs is not to be called any more. What
        does not depend on members is shared with ``like``, one of the same making: what is paid, how output is
        predicted, and which job was picked last.
        """
        self._whose, self._weights, self._lines = whose, weights, cast(TenantLines, lines)
        self._paid, self._lengths, self._pick = like._paid, like._lengths, like._pick

    # -- what a subclass decides ----------------------------------------------------------------------------------

    @abstractmethod
    def _floor(self) -> float:
        """The counter to which a tenant that comes back is lifted."""

    @abstractmethod
    def _why(self, counter: float, tenants: int) -> str:
        """Why the job last popped was picked, in a few words. ``counter``: its tenant's, before it was charged."""

    # The next three are not even called where nobody overrides one: a call costs more than what most do.

    def _rank(self, seat: Seat) -> Any:
        """Smallest goes next. Asked of tenants that wait, and of one whose last job was just popped."""
        return seat.counter

    def _counted(self, seat: Seat, cost: float) -> None:  # noqa: B027
        """``cost`` (negative: given back) was added to the seat's counter, by its weight."""

    def _picked(self, job: Job, counter: float) -> None:  # noqa: B027
        """``job`` left the queue to run; ``counter``: its tenant's, before it was charged."""

    def _entering(self, tenant: TenantId) -> None:  # noqa: B027 - most have nothing to do here
        """A line opens; called before the tenant is lifted."""

    def _pay(self, job: Job) -> float:
        """What the job is expected to cost."""
        lengths = self._lengths
        return self._paid.take(job, 0 if lengths.predict == "none" else lengths.begin(job))

    # -- SchedulingPolicy -----------------------------------------------------------------------------------------

    def push(self, job: Job, now: float) -> None:
        """O(log tenants)."""
        if self._lines.push(job, now):
            self.headed(job.tenant, self._lines.open[job.tenant])

    def pop(self, now: float, fits: Fits) -> Job | None:
        """O(log tenants) and one ``fits`` per head that does not fit."""
        waiting = self.waiting
        seat = waiting.top()
        if seat is None:
            return None
        job = self._lines.pop_if(seat, now, fits)
        if job is None:
            found = self._next(now, fits)
            if found is None:
                return None
            seat, job = found
        counter = seat.counter
        pick = self._pick
        pick[0], pick[1] = job, counter
        cost, weights = self._paid.last if self._repeats else self._pay(job), self._weights
        weight = job.weight if weights is None else weights.get(seat.key, 1.0)
        seat.counter = rank = counter + cost / weight
        if not self._plain:
            self._counted(seat, cost)
            self._picked(job, counter)
            rank = self._rank(seat)
        if seat.line is None:
            self._closed(seat)
            return job
        seat.rank = rank
        if rank < seat.at:  # seldom: who was served goes back
            waiting.put(seat, rank)
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """O(log tenants). What it paid stays paid and is not charged again at the next dispatch."""
        if self._lines.push_front(job, now, reason):
            self.headed(job.tenant, self._lines.open[job.tenant])

    def discard(self, job_id: JobId) -> bool:
        """O(log tenants)."""
        job = self._lines.discard(job_id)
        if job is None:
            return False
        seat = self.seats[job.tenant]
        if seat.key not in self._lines.open:
            seat.line = None
        self.discarded(job, seat)
        return True

    def discarded(self, job: Job, seat: Seat) -> None:
        """A queued job of the seat is gone."""
        self._lengths.forget(job.id)
        self._count(seat, -(self._paid.last if self._repeats else self._paid.refund(job.id)), job)
        if seat.line is None:
            self._closed(seat)
        else:
            self.waiting.put(seat, self._rank(seat))

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """O(1), or O(log tenants) when something is given back."""
        if self._lengths.learns:
            self._lengths.note(job, charge.output, final)
        cost = self._paid.last if self._repeats else self._paid.settle(job, charge, final)
        if not cost:
            return
        whose = self._whose
        tenant = job.tenant if whose is None else whose(job)
        seat = self.seats.get(tenant)
        if seat is None:
            # Unknown here (its job began before a swap, or it was swept): it counts as if it came back now.
            seat = self.seats[tenant] = Seat(tenant, self._floor())
        self._count(seat, cost, job)
        if seat.at is not None:
            seat.rank = rank = seat.counter if self._plain else self._rank(seat)
            if rank < seat.at:
                self.waiting.put(seat, rank)

    def drain(self) -> list[Job]:
        """In order of arrival."""
        self.emptied()
        return self._lines.drain()

    def emptied(self) -> None:
        """All queued jobs are gone; who has some again continues as if it had never stopped waiting."""
        self._resumed = set()
        for seat in self.waiting:
            self._resumed.add(seat.key)
            seat.line = None
        self.waiting.clear()

    def dump(self) -> Json:
        """Counters, what is prepaid, who waits, who left last, the level of the counters, what was learnt."""
        return {**self.dump_counters(), **self._paid.dump(), "lengths": self._lengths.dump()}

    def dump_counters(self) -> Json:
        """Counters, who waits, who left last, and the level of the counters."""
        return {
            "service": {str(tenant): seat.counter for tenant, seat in self.seats.items()},
            "waiting": [str(tenant) for tenant, seat in self.seats.items() if seat.at is not None],
            "last_left": self._last_left,
            "level": self._floor(),
        }

    def load(self, state: Json) -> None:
        """Replace all that. Raises ValueError, and changes no counter, when a shared key does not have its shape."""
        self._lengths.load(state)
        self._paid.load(state)
        self.load_counters(state)

    def load_counters(self, state: Mapping[str, Any]) -> None:
        """Replace the counters. Raises ValueError likewise."""
        service = read_service(state)
        waiting, last, level = state.get("waiting", []), state.get("last_left"), state.get("level")
        if not isinstance(waiting, list) or not (last is None or isinstance(last, str)):
            raise ValueError("'waiting' must be a list of tenants and 'last_left' a tenant or null")
        if level is not None and not is_number(level):
            raise ValueError(f"'level' must be a finite number, got {level!r}")
        waits = list(self.waiting)
        self.seats = {tenant: Seat(tenant, counter) for tenant, counter in service.items()}
        self._last_left = TenantId(last) if last in service else None
        # Who waited there is not coming back from idle when its jobs are pushed here: no lift for it.
        self._resumed = {tenant for tenant in waiting if tenant in service}
        known = [service[tenant] for tenant in self._resumed] or [max(service.values(), default=0.0)]
        self._start(min(known) if level is None else float(level))
        for seat in waits:
            self._resumed.discard(seat.key)
            seat.counter = service.get(seat.key, 0.0)
            self.seats[seat.key] = seat
            self.waiting.put(seat, self._rank(seat))

    def explain(self, job: Job) -> Pick:
        """Its counter, and why that made it the next."""
        last, counter = self._pick
        if last is None or last.id != job.id:
            return Pick("not picked last")
        tenants = len(self.waiting) + (not self._waits(self._of(job)))
        return Pick(self._why(counter, tenants), counter)

    def counters(self) -> Mapping[TenantId, float]:
        """Service ÷ weight per tenant, lifts included."""
        return {tenant: seat.counter for tenant, seat in self.seats.items()}

    def headed(self, tenant: TenantId, line: Any) -> Seat:
        """The tenant has a new head in ``line``; where that opened its line, it comes back from idle. Its seat."""
        seat = self.seats.get(tenant)
        if seat is None or seat.at is None:
            self._entering(tenant)
            counter = 0.0 if seat is None else seat.counter
            if tenant in self._resumed:
                self._resumed.discard(tenant)
            else:
                counter = max(counter, self._floor())
            if seat is None:
                seat = self.seats[tenant] = Seat(tenant, counter)
            seat.counter = counter
            seat.line = line
        self.waiting.put(seat, self._rank(seat))
        if len(self.seats) > self._sweep_at:
            self._sweep()
        return seat

    def __len__(self) -> int:
        return len(self._lines)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _of(self, job: Job) -> TenantId:
        """Whose it is."""
        return job.tenant if self._whose is None else self._whose(job)

    def _start(self, level: float) -> None:  # noqa: B027
        """Counters were loaded; ``level`` is where those who come back are to be lifted."""

    def _waits(self, tenant: TenantId) -> bool:
        seat = self.seats.get(tenant)
        return seat is not None and seat.at is not None

    def _next(self, now: float, fits: Fits) -> tuple[Seat, Job] | None:
        """Whose job to run, and which, when that of the first tenant does not fit."""
        found: Job | None = None

        def accept(seat: Seat) -> bool:
            nonlocal found
            found = self._lines.pop_if(seat, now, fits)
            return found is not None

        seat = self.waiting.next(accept)
        return None if seat is None or found is None else (seat, found)

    def _closed(self, seat: Seat) -> None:
        """The last job of the seat's tenant left its line."""
        self.waiting.take(seat)
        self._last_left = seat.key

    def _count(self, seat: Seat, cost: float, job: Job) -> None:
        """Charge the seat's tenant for ``job`` (negative: give back). The caller ranks it anew."""
        weights = self._weights
        seat.counter += cost / (job.weight if weights is None else weights.get(seat.key, 1.0))
        if not self._plain:
            self._counted(seat, cost)

    def _sweep(self) -> None:
        """Amortised O(1)."""
        floor = self._floor()
        self.seats = {
            tenant: seat
            for tenant, seat in self.seats.items()
            if seat.counter > floor or seat.at is not None or tenant == self._last_left
        }
        self._sweep_at = max(IDLE_KEPT, 2 * len(self.seats))


@cache
def _plain(kind: type[CounterScheduler]) -> bool:
    """Whether the class overrides no hook that is asked for each job."""
    return all(getattr(kind, name) is getattr(CounterScheduler, name) for name in _HOOKS)
