"""What is in flight of one model: which ticket runs where, and how much room that leaves at each worker.

Rules
- A flight is one attempt of one ticket at one worker. It ends when the worker reported the end of every choice, or is
  lost; its ticket may end earlier (caller gone, stop string), and the worker's slot is busy until then all the same.
- Per worker, flights are kept in the order in which they were sent: that is the order in which its engine starts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.choices import ChoiceStream
from gateway.gate import Load, Room
from gateway.pace import Answers, Pace
from gateway.ticket import Ticket
from gateway.worker_handle import WorkerHandle
from workers.protocol import SequenceOutput

DEFAULT_STEP_TOKENS = 512
UNBOUNDED = 1 << 40


@dataclass(slots=True, eq=False)
class Flight:
    """One attempt of one ticket at one worker."""

    ticket: Ticket
    handle: WorkerHandle
    choices: Sequence[ChoiceStream]
    open: set[int]
    """Choices of which the worker has not yet reported the end."""
    load: Load
    prefill: WorkerHandle | None = None
    """Who computes its prompt, where that is another worker."""
    last_token_at: dict[int, float] = field(default_factory=dict)
    """By choice."""
    longest_gap: float = 0.0
    """Seconds between two tokens of a choice."""

    @property
    def produced(self) -> int:
        """Output tokens of this attempt."""
        return sum(choice.billed for choice in self.choices)

    @property
    def answered(self) -> bool:
        """Whether every choice has its end, as the caller sees it."""
        for choice in self.choices:  # noqa: SIM110 - asked twice a message; a generator costs as much as the question
            if choice.finish is None:
                return False
        return True

    def ended(self, index: int) -> None:
        """The worker reported the end of a choice: its slot is free."""
        self.open.discard(index)
        if self.open and len(self.open) < self.load.choices:
            self.load.choices = len(self.open)

    def advance(self, output: SequenceOutput) -> None:
        """Note what the worker says of its progress, for the gate."""
        done = output.prompt_computed + output.prompt_cached
        left = max(0, self.ticket.job.prompt_tokens - done) if done else self.load.prompt_left
        self.load.advance(left, started=bool(output.output_tokens or output.searched or output.text is not None))


class Flights:
    """All flights of one model, by job and by worker."""

    def __init__(self, step_tokens: Mapping[str, int]) -> None:
        """``step_tokens``: token budget of one engine step, by pool."""
        self._step_tokens = step_tokens
        self._by_id: dict[str, Flight] = {}
        self._by_worker: dict[str, dict[str, Flight]] = {}
        self._answers = Answers()
        self._paces: dict[str, Pace] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._by_id.values()))

    def get(self, job_id: str) -> Flight | None:
        """The flight of a job, if it is in flight."""
        return self._by_id.get(job_id)

    def at(self, worker: str) -> list[Flight]:
        """The flights of one worker, oldest first."""
        return list(self._by_worker.get(worker, {}).values())

    def add(self, flight: Flight) -> None:
        """It was sent."""
        job = flight.ticket.job
        job_id = job.id
        assert job_id not in self._by_id
        flight.load.sent_step = flight.handle.step
        flight.load.footprint = self._pace(flight.handle.name).footprint(job.prompt_tokens, job.max_tokens)
        self._by_id[job_id] = flight
        self._by_worker.setdefault(flight.handle.name, {})[job_id] = flight

    def remove(self, flight: Flight) -> None:
        """It ended."""
        job_id = flight.ticket.job.id
        if flight.answered and not flight.ticket.cancelled:
            self._learn(flight)
        del self._by_id[job_id]
        line = self._by_worker[flight.handle.name]
        del line[job_id]
        if not line:
            del self._by_worker[flight.handle.name]

    def room(self, handle: WorkerHandle, now: float) -> Room:
        """What ``handle`` can still take."""
        return Room.of(
            handle.view(now),
            [flight.load for flight in self._by_worker.get(handle.name, {}).values()],
            self._budget(handle),
            stale=handle.is_stale(now),
            pace=self._pace(handle.name),
            step=handle.step,
            longest=handle.hello.longest if handle.hello else None,
        )

    def _budget(self, handle: WorkerHandle) -> int:
        """Tokens that one step of the worker takes. An upstream has no steps that we know: nothing waits for one."""
        if handle.hello is not None and handle.hello.upstream:
            return UNBOUNDED
        return self._step_tokens.get(handle.pool, DEFAULT_STEP_TOKENS)

    def _pace(self, worker: str) -> Pace:
        pace = self._paces.get(worker)
        if pace is None:
            pace = self._paces[worker] = Pace(self._answers)
        return pace

    def _learn(self, flight: Flight) -> None:
        most = flight.ticket.job.max_tokens // max(1, flight.ticket.lines)
        if not most:
            return
        for choice in flight.choices:
            if choice.finish in ("stop", "length"):
                self._answers.ended(choice.billed, most)
