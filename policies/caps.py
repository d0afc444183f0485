"""Caps on what runs at once, whatever the order of the queue: they tighten every policy's bound. Pure.

Rules
- A cap only holds back, it never picks: a capped tenant or class waits for its own jobs, and nobody waits for it.
- Tokens are counted at their most (``Job.total_tokens``), so that running jobs cannot grow past the cap. A job that
  alone is above it runs when its tenant has nothing else running: a cap delays, it never locks out.
- Where a policy keeps one line per tenant, a capped job at its head also holds up its own tenant's other jobs.
- A cap on a class keeps the remaining slots for the others: bulk work that filled every slot would make priority
  meaningless, since a running job is not taken off again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from policies.spi import Fits
from policies.types import Job, JobId, TenantId

Beside = Callable[[Job, Job], bool]
"""May the first job run now without taking anything that the second, which is held, waits for?"""


@dataclass(frozen=True, slots=True)
class Caps:
    """None, or a class that is not named: no cap. Raises ValueError for a cap below 1."""

    jobs_per_tenant: int | None = None
    tokens_per_tenant: int | None = None
    """Prompt + most output tokens of a tenant's running jobs."""
    jobs_per_class: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named: dict[str, int | None] = {
            f"max_running_per_class.{name}": cap for name, cap in self.jobs_per_class.items()
        }
        named["max_running_per_tenant"] = self.jobs_per_tenant
        named["max_running_tokens_per_tenant"] = self.tokens_per_tenant
        for name, cap in named.items():
            if cap is not None and cap < 1:
                raise ValueError(f"{name} must be at least 1, got {cap}; leave it out for no cap")


class Running:
    """Counts what runs, against the caps. Every operation is O(1)."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        """May be replaced at any time; what runs already goes on."""
        self._jobs: dict[TenantId, int] = {}
        self._tokens: dict[TenantId, int] = {}
        self._classes: dict[str, int] = {}

    def allows(self, job: Job) -> bool:
        """May one more job like this run now?"""
        caps = self.caps
        jobs = self._jobs.get(job.tenant, 0)
        if caps.jobs_per_tenant is not None and jobs >= caps.jobs_per_tenant:
            return False
        most = caps.tokens_per_tenant
        if most is not None and jobs and self._tokens[job.tenant] + job.total_tokens > most:
            return False
        cap = caps.jobs_per_class.get(job.service_class) if caps.jobs_per_class else None
        return cap is None or self._classes.get(job.service_class, 0) < cap

    def add(self, job: Job) -> None:
        """It was dispatched."""
        self._jobs[job.tenant] = self._jobs.get(job.tenant, 0) + 1
        self._tokens[job.tenant] = self._tokens.get(job.tenant, 0) + job.total_tokens
        self._classes[job.service_class] = self._classes.get(job.service_class, 0) + 1

    def remove(self, job: Job) -> None:
        """It ended or came back."""
        left = self._jobs[job.tenant] - 1
        if left:
            self._jobs[job.tenant] = left
            self._tokens[job.tenant] -= job.total_tokens
        else:
            del self._jobs[job.tenant]
            del self._tokens[job.tenant]
        of_class = self._classes[job.service_class] - 1
        if of_class:
            self._classes[job.service_class] = of_class
        else:
            del self._classes[job.service_class]

    def jobs_of(self, tenant: TenantId) -> int:
        """Running jobs of one tenant."""
        return self._jobs.get(tenant, 0)

    def tokens_of(self, tenant: TenantId) -> int:
        """Most tokens that its running jobs can occupy."""
        return self._tokens.get(tenant, 0)


class Gate:
    """``fits`` of one ``next``, with caps and a held job on top; notes whom it refuses for want of room."""

    __slots__ = ("_beside", "_caps", "_fits", "_held", "passed", "refused")

    def __init__(self, caps: Running, held: Job | None, fits: Fits, beside: Beside | None = None) -> None:
        self._caps = caps
        self._held = held
        self._fits = fits
        self._beside = beside
        self.refused: list[JobId] = []
        self.passed: Job | None = None
        """Whom it let through last."""

    def __call__(self, job: Job) -> bool:
        if not self._may(job):
            return False
        if self._fits(job):
            self.passed = job
            return True
        self.refused.append(job.id)
        return False

    def quiet(self, job: Job) -> bool:
        """The same answer, of which nothing is noted: for who only watches (``shadow.py``)."""
        return self._may(job) and self._fits(job)

    def _may(self, job: Job) -> bool:
        if not self._caps.allows(job):
            return False
        held = self._held
        return held is None or job.id == held.id or (self._beside is not None and self._beside(job, held))
