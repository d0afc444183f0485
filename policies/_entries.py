"""What the queue core keeps of a job that is queued, of one that runs, and of a tenant with queued jobs."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.types import Job, Usage

_UNUSED = Usage()


@dataclass(slots=True, eq=False)
class Kind:
    """Queued jobs that are alike in all that a worker is chosen by (``demand.py``)."""

    name: tuple[str, str | None, str | None, bool, tuple[tuple[str, str], ...]]
    jobs: int = 0
    shortest: list[tuple[int, int, Job]] = field(default_factory=list)
    """A heap by prompt length, with entries of jobs that have left: (prompt tokens, order, job)."""


@dataclass(slots=True)
class Queued:
    """A job that waits."""

    job: Job
    order: int
    since: float
    epoch: int
    waited_s: float = 0.0
    attempt: int = 1
    passed: int = 0
    usage: Usage = _UNUSED
    kind: Kind | None = None
    """Where ``demand.py`` counts it."""


@dataclass(slots=True)
class InFlight:
    """A job that was dispatched; its usage in plain numbers, which change with every step."""

    job: Job
    order: int
    waited_s: float
    attempt: int
    prompt: int
    cached: int
    output: int

    @property
    def usage(self) -> Usage:
        """What ran so far."""
        return Usage(self.prompt, self.cached, self.output)


@dataclass(slots=True)
class TenantLine:
    """A tenant with queued jobs: how many, of how many tokens."""

    weight: float
    queued: int = 0
    tokens: int = 0
