"""``sjf``: shortest job first by predicted cost ÷ weight, with ageing: the least mean wait, not fair shares.

Source: Smith, "Various optimizers for single-stage production" (1956): cost ÷ weight first minimises the weighted mean
completion time. Ageing as in highest-response-ratio schedulers, made linear so that two jobs never change their order.

Rules
- A job's key is predicted cost ÷ weight + ``ageing`` · arrival time; the smallest goes first. So waiting a second is
  worth ``ageing`` units of cost, and a job is overtaken only by those that arrive within (its cost ÷ weight) ÷
  ``ageing`` seconds after it: its wait is bounded by that and the work that was there by then.
- The prediction (``_lengths.py``) is made when the job arrives and not revised while it waits.
- A head that does not fit holds up its own tenant only.
"""

from __future__ import annotations

from pydantic import Field

from policies.scheduling._keyed import KeyedHeads
from policies.scheduling._lengths import Lengths, Predict, PredictingConfig
from policies.scheduling._tariff import Tariff
from policies.spi import Fits, Json, PolicyContext, PolicySpec
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId


class SjfConfig(PredictingConfig):
    """Cost per token, prediction, ageing."""

    predict: Predict = "quantile"
    ageing: float = Field(32.0, ge=0, allow_inf_nan=False)
    """Units of cost that a second of waiting is worth; 0: long jobs may starve."""


class SjfScheduler:
    """O(log n) per operation."""

    def __init__(self, tariff: Tariff, lengths: Lengths, ageing: float) -> None:
        self._tariff = tariff
        self._lengths = lengths
        self._ageing = ageing
        self._queue: KeyedHeads[TenantId] = KeyedHeads()
        self._pick: tuple[Job, int] | None = None

    def push(self, job: Job, now: float) -> None:
        """O(log n)."""
        self._queue.push(job.tenant, job, self._key(job))

    def pop(self, now: float, fits: Fits) -> Job | None:
        """O(log n) and one ``fits`` per tenant whose head does not fit."""
        queue = self._queue
        line = queue.first(fits)
        if line is None:
            return None
        job = queue.pop(line)
        self._lengths.start(job)
        self._pick = (job, len(queue) + 1)
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """First of its tenant; between tenants its key counts as before."""
        self._queue.push_front(job.tenant, job, self._key(job))

    def discard(self, job_id: JobId) -> bool:
        """O(log n)."""
        if self._queue.discard(job_id) is None:
            return False
        self._lengths.forget(job_id)
        return True

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """Lengths are learnt; service does not matter."""
        self._lengths.note(job, charge.output, final)

    def drain(self) -> list[Job]:
        """In order of arrival."""
        return self._queue.drain()

    def dump(self) -> Json:
        """What was learnt."""
        return {"lengths": self._lengths.dump()}

    def load(self, state: Json) -> None:
        """Replace what was learnt. Raises ValueError when malformed."""
        self._lengths.load(state)

    def explain(self, job: Job) -> Pick:
        """What it is expected to cost."""
        if self._pick is None or self._pick[0].id != job.id:
            return Pick("not picked last")
        output = self._lengths.expect(job)
        return Pick(f"shortest of {self._pick[1]} queued that fits, waits count: {output} output tokens expected")

    def __len__(self) -> int:
        return len(self._queue)

    def _key(self, job: Job) -> float:
        tariff = self._tariff
        cost = job.prompt_tokens * tariff.input_cost + self._lengths.expect(job) * tariff.output_cost
        return cost / job.weight + self._ageing * job.arrived_at


def _make(config: SjfConfig, ctx: PolicyContext) -> SjfScheduler:
    return SjfScheduler(config.tariff(), config.lengths(), config.ageing)


SPEC = PolicySpec(
    "scheduling", "sjf", SjfConfig, _make, "Shortest predicted cost ÷ weight first, with ageing: least mean wait."
)
