"""``fcfs``: first come, first served over all tenants. The baseline; not fair, and says so."""

from __future__ import annotations

from policies.scheduling._lines import Lines
from policies.scheduling._ranking import Ranking
from policies.spi import Fits, Json, NoConfig, PolicyContext, PolicySpec
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId


class FcfsScheduler:
    """Heads of the tenants' lines in order of arrival; a head that does not fit holds up its own tenant only."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._heads: Ranking[TenantId] = Ranking()
        self._pick: tuple[JobId, int, int] | None = None

    def push(self, job: Job, now: float) -> None:
        """O(log tenants)."""
        if self._lines.push(job):
            self._rank(job.tenant)

    def pop(self, now: float, fits: Fits) -> Job | None:
        """O(log tenants) and one ``fits`` per head that does not fit."""
        asked = 0

        def accept(tenant: TenantId) -> bool:
            nonlocal asked
            asked += 1
            return fits(self._lines.head(tenant))

        tenant = self._heads.first(accept)
        if tenant is None:
            return None
        self._pick = (self._lines.head(tenant).id, asked - 1, len(self._lines))
        job = self._lines.pop(tenant)
        self._rank(tenant)
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """To the front of all."""
        self._lines.push_front(job)
        self._rank(job.tenant)

    def discard(self, job_id: JobId) -> bool:
        """O(log tenants)."""
        job = self._lines.discard(job_id)
        if job is None:
            return False
        self._rank(job.tenant)
        return True

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """Service does not matter here."""

    def drain(self) -> list[Job]:
        """In order of arrival."""
        self._heads.clear()
        return self._lines.drain()

    def dump(self) -> Json:
        """It has no counters."""
        return {}

    def load(self, state: Json) -> None:
        """It has no counters."""

    def explain(self, job: Job) -> Pick:
        """How many came before it."""
        if self._pick is None or self._pick[0] != job.id:
            return Pick("not picked last")
        _, passed, queued = self._pick
        if passed:
            return Pick(f"first of {queued} queued that fits; {passed} earlier do not")
        return Pick(f"arrived first of {queued} queued")

    def __len__(self) -> int:
        return len(self._lines)

    def _rank(self, tenant: TenantId) -> None:
        if self._lines.has(tenant):
            self._heads.set(tenant, self._lines.head_order(tenant))
        elif tenant in self._heads:
            self._heads.remove(tenant)


def _make(config: NoConfig, ctx: PolicyContext) -> FcfsScheduler:
    return FcfsScheduler()


SPEC = PolicySpec(
    "scheduling", "fcfs", NoConfig, _make, "First come, first served over all tenants: simple, and not fair."
)
