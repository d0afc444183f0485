"""What work costs, and jobs that are paid at dispatch on an estimate and corrected by what really ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from policies.spi import PolicyConfig
from policies.types import Charge, Job, JobId, TenantId

_UNKNOWN = TenantId("")


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
    """Tokens paid at dispatch that have not been reported yet, per job: its prompt, and output if it is predicted.

    Whatever the estimate was, take + all settlements of a job add up to the tariff of what ran: tokens that turn out
    cached are refunded down to ``cached_cost``; tokens never computed or produced are refunded with the final charge.
    """

    __slots__ = ("_left", "last", "tariff")

    def __init__(self, tariff: Tariff) -> None:
        self.tariff = tariff
        self._left: dict[JobId, tuple[int, int, TenantId]] = {}
        self.last = 0.0
        """What the last call of ``take``, ``settle`` or ``refund`` said: for who pays the same price for the same."""

    def take(self, job: Job, output: int = 0, cached: int = 0) -> float:
        """Cost to charge at dispatch; nothing when the job was dispatched before (a retry does not pay twice).

        ``output``: tokens that it is expected to produce. ``cached``: prompt tokens expected to cost nothing.
        """
        left, job_id, tariff = self._left, job.id, self.tariff
        if job_id in left:
            self.last = 0.0
            return 0.0
        prompt = job.prompt_tokens - cached
        left[job_id] = (prompt, output, job.tenant)
        self.last = cost = prompt * tariff.input_cost + output * tariff.output_cost
        return cost

    def settle(self, job: Job, charge: Charge, final: bool) -> float:
        """Cost to charge (negative: to give back) for reported work, beside what was taken. O(1)."""
        tariff, left = self.tariff, self._left
        paid = left.get(job.id)
        if paid is None:
            self.last = cost = tariff.cost(charge)
            return cost
        prompt, output, tenant = paid
        if final:
            del left[job.id]
            self.last = cost = tariff.cost(charge) - prompt * tariff.input_cost - output * tariff.output_cost
            return cost
        read = charge.prompt + charge.cached
        read = 0 if read < 0 else prompt if read > prompt else read
        made = 0 if charge.output < 0 else output if charge.output > output else charge.output
        cost = (charge.prompt - read) * tariff.input_cost + (charge.output - made) * tariff.output_cost
        self.last = cost = cost + charge.cached * tariff.cached_cost
        if read or made:
            left[job.id] = (prompt - read, output - made, tenant)
        return cost

    def refund(self, job_id: JobId) -> float:
        """Cost to give back for a returned job that leaves the queue without running again."""
        prompt, output, _ = self._left.pop(job_id, (0, 0, ""))
        self.last = cost = prompt * self.tariff.input_cost + output * self.tariff.output_cost
        return cost

    def dump(self) -> dict[str, dict[str, int]]:
        """The shared keys ``prepaid`` and ``prepaid_output``: {job id: tokens}."""
        return {
            "prepaid": {str(job_id): prompt for job_id, (prompt, _, _) in self._left.items()},
            "prepaid_output": {str(job_id): output for job_id, (_, output, _) in self._left.items() if output},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace by those keys of a ``dump``; absent ones are empty. Raises ValueError for what is none."""
        self._left = _read(state, _UNKNOWN)

    def add(self, state: Mapping[str, Any], tenant: TenantId) -> None:
        """Likewise, of one tenant's jobs, beside what is there."""
        self._left.update(_read(state, tenant))

    def tenants(self) -> dict[JobId, TenantId]:
        """Whose jobs these are, as far as they were dispatched here or ``add`` told it."""
        return {job_id: tenant for job_id, (_, _, tenant) in self._left.items()}

    def __len__(self) -> int:
        """Jobs that were dispatched and have not had their final charge."""
        return len(self._left)


def _read(state: Mapping[str, Any], tenant: TenantId) -> dict[JobId, tuple[int, int, TenantId]]:
    prompts, outputs = _tokens(state, "prepaid"), _tokens(state, "prepaid_output")
    return {job_id: (prompt, outputs.get(job_id, 0), tenant) for job_id, prompt in prompts.items()}


def _tokens(state: Mapping[str, Any], key: str) -> dict[JobId, int]:
    found = state.get(key, {})
    if not isinstance(found, Mapping) or not all(isinstance(value, int) for value in found.values()):
        raise ValueError(f"{key!r} must map job ids to whole tokens")
    return {JobId(str(job_id)): max(0, tokens) for job_id, tokens in found.items()}
