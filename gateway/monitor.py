"""What the request path reports while it works: counted as metrics and told to observers, never waited for.

``Monitor`` does nothing; ``compose.py`` makes the one that feeds Prometheus and the ``forebay_job_event`` observers.

Rules
- Every method returns at once and never raises: no report may cost a request anything.
"""

from __future__ import annotations

from policies.types import Charge, Job, JobEvent, QuotaDecision, RouteDecision, Transition


class Monitor:
    """Hears nothing. A base class and not a Protocol, so that a report added here breaks no other implementation."""

    def event(
        self,
        job: Job,
        transition: Transition,
        at: float,
        *,
        worker: str | None = None,
        outcome: str | None = None,
        reason: str | None = None,
        usage: Charge | None = None,
    ) -> None:
        """A job made a transition."""

    def waited(self, job: Job, seconds: float) -> None:
        """A job left the queue to run."""

    def served(self, job: Job, charge: Charge) -> None:
        """Work ran for a job."""

    def routed(self, decision: RouteDecision) -> None:
        """A worker was picked."""

    def gap(self, job: Job, seconds: float) -> None:
        """Seconds between two tokens of one choice."""

    def quota(self, job: Job, decision: QuotaDecision) -> None:
        """The quota policy decided."""

    def stale(self, worker: str) -> None:
        """A job was gated without the worker's own figures, because these are too old."""

    def fault(self, where: str) -> None:
        """An isolated part (a policy, an observer, a settlement) failed; the request path went on."""


def job_event(
    job: Job,
    transition: Transition,
    at: float,
    worker: str | None,
    outcome: str | None,
    reason: str | None,
    usage: Charge | None,
) -> JobEvent:
    """The event as plugins see it."""
    return JobEvent(job, transition, at, worker=worker, outcome=outcome, reason=reason, usage=usage)
