"""What work costs, and prompts that are paid at dispatch on an estimate and corrected by what really ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from policies.spi import PolicyConfig
from policies.types import Charge, Job, JobId


class TariffConfig(PolicyConfig):
    """Cost per token. Output costs twice the input by default: one decode step reads all weights for one token."""

    input_cost: float = Field(1.0, ge=0, allow_inf_nan=False)
    output_cost: float = Field(2.0, ge=0, allow_inf_nan=False)
    cached_cost: float = Field(0.0, ge=0, allow_inf_nan=False)

    def tariff(self) -> Tariff:
        """The same figures for calculating."""
        return Tariff(self.input_cost, self.output_cost, self.cached_cost)


@dataclass(frozen=True, slots=True)
class Tariff:
    """Cost per token of each kind."""

    input_cost: float
    output_cost: float
    cached_cost: float

    def cost(self, charge: Charge) -> float:
        """Cost of work that ran."""
        return charge.prompt * self.input_cost + charge.cached * self.cached_cost + charge.output * self.output_cost


class Prepaid:
    """Prompt tokens paid at dispatch that have not been reported yet, per job.

    Whatever the estimate was, take + all settlements of a job add up to the tariff of what ran: tokens that turn out
    cached are refunded down to ``cached_cost``, tokens never computed (cancelled) are refunded with the final charge.
    """

    def __init__(self, tariff: Tariff) -> None:
        self._tariff = tariff
        self._left: dict[JobId, int] = {}

    def take(self, job: Job) -> float:
        """Cost to charge at dispatch; nothing when the job was dispatched before (a retry does not pay twice)."""
        if job.id in self._left:
            return 0.0
        self._left[job.id] = job.prompt_tokens
        return job.prompt_tokens * self._tariff.input_cost

    def settle(self, job: Job, charge: Charge, final: bool) -> float:
        """Cost to charge (negative: to give back) for reported work, beside what was taken. O(1)."""
        left = self._left.get(job.id, 0)
        covered = min(left, max(0, charge.prompt + charge.cached))
        cost = self._tariff.cost(charge) - covered * self._tariff.input_cost
        if final:
            self._left.pop(job.id, None)
            cost -= (left - covered) * self._tariff.input_cost
        elif covered:
            self._left[job.id] = left - covered
        return cost

    def refund(self, job_id: JobId) -> float:
        """Cost to give back for a returned job that leaves the queue without running again."""
        return self._left.pop(job_id, 0) * self._tariff.input_cost

    def dump(self) -> dict[str, int]:
        """{job id: tokens}."""
        return {str(job_id): tokens for job_id, tokens in self._left.items()}

    def load(self, state: Any) -> None:
        """Replace by a ``dump``. Raises ValueError for anything else."""
        if not isinstance(state, Mapping) or not all(isinstance(value, int) for value in state.values()):
            raise ValueError("'prepaid' must map job ids to whole tokens")
        self._left = {JobId(str(job_id)): max(0, tokens) for job_id, tokens in state.items()}
