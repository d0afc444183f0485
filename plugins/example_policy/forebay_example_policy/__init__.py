"""``turns``: one job of each waiting tenant in turn, whatever it costs. docs/writing-a-policy.md walks through it."""

from __future__ import annotations

from collections import OrderedDict

from policies.spi import Fits, Json, NoConfig, PolicyContext, PolicySpec, hookimpl
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId


class Turns:
    def __init__(self) -> None:
        self._lines: OrderedDict[TenantId, OrderedDict[JobId, Job]] = OrderedDict()
        self._tenant: dict[JobId, TenantId] = {}

    def push(self, job: Job, now: float) -> None:
        if job.id in self._tenant:
            raise ValueError(f"job {job.id!r} is queued already")
        self._tenant[job.id] = job.tenant
        self._lines.setdefault(job.tenant, OrderedDict())[job.id] = job

    def pop(self, now: float, fits: Fits) -> Job | None:
        for tenant, line in self._lines.items():
            job = next(iter(line.values()))
            if fits(job):
                self._lines.move_to_end(tenant)
                self.discard(job.id)
                return job
        return None

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        self.push(job, now)
        self._lines[job.tenant].move_to_end(job.id, last=False)
        self._lines.move_to_end(job.tenant, last=False)

    def discard(self, job_id: JobId) -> bool:
        tenant = self._tenant.pop(job_id, None)
        if tenant is not None:
            del self._lines[tenant][job_id]
            if not self._lines[tenant]:
                del self._lines[tenant]
        return tenant is not None

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None: ...

    def drain(self) -> list[Job]:
        jobs = [job for line in self._lines.values() for job in line.values()]
        self._lines.clear()
        self._tenant.clear()
        return jobs

    def dump(self) -> Json:
        return {}

    def load(self, state: Json) -> None: ...

    def explain(self, job: Job) -> Pick:
        return Pick(f"the turn of {job.tenant}")

    def __len__(self) -> int:
        return len(self._tenant)


def make(config: NoConfig, ctx: PolicyContext) -> Turns:
    return Turns()


@hookimpl
def forebay_policies() -> list[PolicySpec]:
    return [PolicySpec("scheduling", "turns", NoConfig, make, "One job of each waiting tenant in turn.")]
