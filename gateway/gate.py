"""How much more a worker can take now: late binding, so that the backlog waits here, where its order still holds.

Rules
- The gate is what this gateway itself sent and has not seen end, against the worker's ``max_running``. The worker's own
  line may hold ``MAX_WAITING`` jobs, to bridge the way there and back: the slot that comes free next is taken at once.
  No more than one, since whoever is next here waits behind them: with one it runs when two running jobs have ended.
- A job starts in the worker's next step while that step has token budget left: those beyond it would wait there, so
  they count against the line. A worker that reports a line of its own gets no more than fills that line: what was
  sent in the last two steps is not in its report yet and counts on top.
- Blocks: the worker's free + cached ones, net of what was sent and is not in its figures yet, must hold its prompt
  and the first block of each choice's output, not its max_tokens: most answers are shorter, and the engine preempts
  when they are not. An idle worker takes any job that its context holds: other figures may be wrong, and then it
  refuses by itself. Prompt + output beyond its context never goes there: another worker may have the room.
- Stale figures (> 2 s) count neither blocks nor the reported line; in-flight counts alone gate then.
- A worker whose cache fills up gets its jobs evenly spaced (``pace.py``).
- A worker holds one suspect at a time (``retry.py``).
- ``Room`` is made for one turn of the dispatcher and updated by ``take``; ``fits`` is O(1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.pace import Pace
from policies.queue import Dispatch, JobQueue
from policies.spi import Fits
from policies.types import EXTERNAL, Job, WorkerView, kv_blocks

if TYPE_CHECKING:
    from gateway.worker_handle import WorkerHandle

MAX_WAITING = 1


@dataclass(slots=True)
class Load:
    """What the gate must know of one job in flight."""

    prompt_left: int
    choices: int
    started: bool
    """Its first token came."""
    suspect: bool = False
    footprint: float = 0.0
    """Tokens it holds on average (``Pace.footprint``)."""
    sent_step: int = 0
    """The worker's last reported step when it was sent."""

    def advance(self, prompt_left: int, *, started: bool) -> None:
        """Note what the worker says of its progress."""
        self.prompt_left = prompt_left
        self.started = self.started or started


Claim = tuple[int, bool]
"""What the gate must know of a queued job: its choices, and whether it is a suspect."""


@dataclass(slots=True)
class Room:
    """One worker's room in this turn."""

    reported: WorkerView
    """The worker as it was when the turn began."""
    slots: int
    """Choices it can still run at once."""
    budget: int
    """Tokens that its next step has left for prompts."""
    line: int
    """Jobs that may wait in its own line."""
    blocks: int
    idle: bool
    stale: bool
    suspect: bool
    pace: Pace | None = None
    longest: int | None = None
    """Most tokens of prompt + output of one choice there; None: not known, and not asked."""
    sent: int = 0
    """Choices sent there in this turn."""
    sent_tokens: int = 0

    @classmethod
    def of(
        cls,
        view: WorkerView,
        loads: Iterable[Load],
        step_tokens: int,
        *,
        stale: bool,
        pace: Pace | None = None,
        step: int = 0,
        longest: int | None = None,
    ) -> Room:
        """Measure ``view``'s worker. ``loads`` are its jobs in flight, oldest first; ``step`` its last reported one."""
        slots, budget, waiting, suspect, idle = view.max_running, step_tokens, 0, False, True
        committed = 0.0
        unstarted: list[Load] = []
        for load in loads:
            idle = False
            suspect = suspect or load.suspect
            committed += load.footprint
            if load.started:
                slots -= load.choices
                budget -= load.choices
            else:
                unstarted.append(load)
        for load in unstarted:
            if load.choices <= slots and budget > 0:
                slots -= load.choices
                budget -= load.prompt_left
            else:
                waiting += 1
        if not stale and view.waiting > 0:
            # A worker takes its figures before it reads its mail, so a job shows in the report after the next.
            waiting = max(waiting, view.waiting + sum(load.sent_step >= step - 1 for load in unstarted))
            budget = 0
        if pace is not None:
            pace.begin(step, committed, view.total_blocks * view.block_size // max(1, len(view.keeps)))
        return cls(
            reported=view,
            slots=slots,
            budget=budget,
            line=MAX_WAITING - waiting,
            blocks=view.free_blocks,
            idle=idle,
            stale=stale,
            suspect=suspect,
            pace=pace,
            longest=longest,
        )

    @property
    def view(self) -> WorkerView:
        """The worker with what was sent in this turn, for the routing policy."""
        if not self.sent:
            return self.reported
        return replace(
            self.reported,
            inflight=self.reported.inflight + self.sent,
            inflight_tokens=self.reported.inflight_tokens + self.sent_tokens,
            free_blocks=max(0, self.blocks),
        )

    @property
    def open(self) -> bool:
        """Whether any job could go there."""
        if self.idle:
            return True
        if not self.stale and self.pace is not None and self.pace.rest:
            return False
        return self.line > 0 or (self.slots > 0 and self.budget > 0)

    def matches(self, job: Job, choices: int = 1) -> bool:
        """Whether its pool carries the labels that the job needs and takes its class, and its context holds it."""
        return takes(self.reported, job) and holds(self.longest, job, choices)

    def fits(self, job: Job, choices: int, *, suspect: bool) -> bool:
        """May ``job`` go there now?"""
        if (suspect and self.suspect) or not self.matches(job, choices):
            return False
        if self.idle:
            return True
        if not self.stale and self._need(job, choices) > self.blocks:
            return False
        if self._starts(choices):
            return True
        return self.line > 0 and choices <= self.slots + MAX_WAITING

    def might(self, least: Job) -> bool:
        """Whether any job could go there that asks for what ``least`` does or more: a longer prompt, more choices."""
        if not takes(self.reported, least):
            return False
        if self.idle:
            return True
        return (self.stale or self._need(least, 1) <= self.blocks) and (self._starts(1) or self.line > 0)

    def take(self, job: Job, choices: int, *, suspect: bool, prompt: int | None = None) -> None:
        """``job`` was sent there. ``prompt``: how much of its prompt it has to compute there, if not all."""
        if self._starts(choices):
            self.slots -= choices
            self.budget -= job.prompt_tokens if prompt is None else prompt
        else:
            self.line -= 1
        self.blocks -= self._need(job, choices)
        self.sent += choices
        self.sent_tokens += job.total_tokens
        self.idle = False
        self.suspect = self.suspect or suspect
        if self.pace is not None:
            self.pace.sent(job.prompt_tokens, job.max_tokens)

    def _starts(self, choices: int) -> bool:
        return choices <= self.slots and self.budget > 0

    def _need(self, job: Job, choices: int) -> int:
        worker = self.reported
        first = kv_blocks(job.prompt_tokens + 1, worker.block_size, worker.keeps)
        return first if choices == 1 else first + (choices - 1) * max(1, len(worker.keeps))


def fill(
    queue: JobQueue,
    rooms: Iterable[Room],
    now: float,
    *,
    claim: Callable[[Job], Claim],
    could_fit: Fits,
    send: Callable[[Dispatch, list[Room]], None],
    may: Callable[[Job, Room], bool] = lambda job, room: True,
) -> bool:
    """Take jobs from ``queue`` while a room is open and something queued fits.

    ``send(dispatch, rooms)`` picks one of the rooms, sends, and updates it (``take``) or removes it from the list.
    ``may``: what else has to hold for a job in a room (``pool_roles.py``). ``could_fit``: see ``JobQueue.next``; a job
    for which others wait keeps only the rooms it might use to itself. Where not even the least demanding job could go
    anywhere, the policy is not asked. The gateway's dispatcher and the simulator both
    fill their workers with this. Returns whether a room is still open.
    """
    open_rooms = [room for room in rooms if room.open]

    def fits_in(job: Job, among: Iterable[Room]) -> bool:
        choices, suspect = claim(job)
        for room in among:  # noqa: SIM110 - asked for every job; a generator costs as much as the question
            if room.fits(job, choices, suspect=suspect) and may(job, room):
                return True
        return False

    def fits(job: Job) -> bool:
        return fits_in(job, open_rooms)

    def beside(job: Job, held: Job) -> bool:
        return fits_in(job, (room for room in open_rooms if not room.matches(held, claim(held)[0])))

    def hopeless(held: Job | None) -> bool:
        """Whether nothing queued fits for a reason that all share: then no policy need ask about every tenant."""
        among: Iterable[Room] = open_rooms
        if held is not None:
            if fits(held):
                return False
            choices, _ = claim(held)
            among = [room for room in open_rooms if not room.matches(held, choices)]
        for job in queue.demand.least():
            for room in among:
                if room.might(job):
                    return False
        return True

    while open_rooms:
        if not len(queue):
            return True
        held = queue.held(could_fit)
        if hopeless(held):
            return True
        dispatch = queue.next(now, fits, could_fit, beside)
        if dispatch is None:
            return True
        free, kept = open_rooms, []
        if held is not None and held.id != dispatch.job.id:
            choices, _ = claim(held)
            free = [room for room in open_rooms if not room.matches(held, choices)]
            kept = [room for room in open_rooms if room.matches(held, choices)]
        send(dispatch, free)
        open_rooms = [room for room in (*kept, *free) if room.open]
    return False


def takes(worker: WorkerView | WorkerHandle, job: Job) -> bool:
    """Whether the worker has the job's adapter, and its pool the labels; a pool may be kept for some classes."""
    if worker.classes and job.service_class not in worker.classes:
        return False
    if job.adapter is not None and job.adapter_digest not in worker.adapters:
        return False
    labels = worker.labels
    if labels.get(EXTERNAL) == "true" and not job.allow_external:
        return False
    return not job.requires or all(labels.get(key) == value for key, value in job.requires.items())


def suits(worker: WorkerHandle, job: Job, choices: int | None = None) -> bool:
    """Whether the worker may run the job: its pool does, and its context holds it where ``choices`` says how often."""
    longest = worker.hello.longest if choices is not None and worker.hello is not None else None
    return takes(worker, job) and holds(longest, job, choices or 1)


def holds(longest: int | None, job: Job, choices: int) -> bool:
    """Whether a worker whose sequences have at most ``longest`` tokens (None: any) holds each choice of the job."""
    return longest is None or job.prompt_tokens + job.max_tokens // max(1, choices) <= longest
