"""``open``: lets everything into the queue; only ``max_wait_s`` of the job bounds its stay there."""

from __future__ import annotations

from policies.spi import NoConfig, PolicyContext, PolicySpec
from policies.types import AdmissionDecision, Job, QueueSnapshot


class OpenAdmission:
    """Never refuses. The queue can grow without bound."""

    def check(self, job: Job, queue: QueueSnapshot, now: float) -> AdmissionDecision:
        """Admit."""
        return AdmissionDecision(admitted=True)


def _make(config: NoConfig, ctx: PolicyContext) -> OpenAdmission:
    return OpenAdmission()


SPEC = PolicySpec("admission", "open", NoConfig, _make, "Admits everything; the queue is unbounded.")
