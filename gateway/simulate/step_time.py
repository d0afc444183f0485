"""How long a step takes: a linear function of what it computes, in whole picoseconds.

Whole numbers, because they add up the same in any order: steps advanced together end when the same steps would have
ended one by one. A picosecond is fine enough for a cost per attended position.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gateway.config_file import ConfigErrors, validated
from gateway.simulate.arrivals import Part
from gateway.simulate.scenario import StepCost
from gateway.yaml_source import Mistake, Source
from workers.engine.plan import StepPlan
from workers.engine.sequence import Sequence

PS_PER_S = 10**12
_PS_PER_MS = 10**9


@dataclass(frozen=True, slots=True)
class StepTime:
    """Picoseconds: per step, per decoding sequence, per prompt token, per attended position."""

    base: int
    per_decode: int
    per_prefill_token: int
    per_context_token: int = 0
    told: int | None = None
    """``StepCost.twice_at``."""

    @classmethod
    def of(cls, cost: StepCost) -> StepTime:
        """From figures in milliseconds."""
        base, decode, token, position = (
            round(figure * _PS_PER_MS)
            for figure in (cost.base, cost.per_decode, cost.per_prefill_token, cost.per_context_token)
        )
        return cls(base, decode, token, position, cost.twice_at)

    @property
    def twice_at(self) -> int:
        """At so many tokens of context a prompt's token takes twice as long as at the start; 0: it never does."""
        if self.told is not None:
            return self.told
        return max(1, self.per_prefill_token // self.per_context_token) if self.per_context_token else 0

    def plan(self, plan: StepPlan) -> int:
        """Picoseconds of one planned step."""
        decodes = prefill = attended = 0
        for chunk in plan.chunks:
            if chunk.is_decode:
                decodes += 1
            else:
                prefill += chunk.count
        if self.per_context_token:
            attended = sum(chunk.count * chunk.start + chunk.count * (chunk.count + 1) // 2 for chunk in plan.chunks)
        return (
            self.base + decodes * self.per_decode + prefill * self.per_prefill_token + attended * self.per_context_token
        )

    def stretch(self, running: list[Sequence]) -> tuple[int, int]:
        """Picoseconds of the next decode-only step of ``running``, and by how much each further one is longer."""
        count = len(running)
        first = self.base + count * self.per_decode
        if self.per_context_token:
            first += self.per_context_token * sum(sequence.computed + 1 for sequence in running)
        return first, count * self.per_context_token


def load(cost: StepCost, base_dir: Path) -> StepTime:
    """The figures, from the calibration file if one is named. Raises ConfigErrors."""
    if cost.calibration is None:
        return StepTime.of(cost)
    path = base_dir / cost.calibration
    where = ("workers", "step_ms", "calibration")
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"is not JSON ({error})"
        raise ConfigErrors(path, [Mistake(where, f"{cost.calibration}: {why}")]) from None
    figures = data.get("step_ms") if isinstance(data, dict) else None
    if not isinstance(figures, dict):
        raise ConfigErrors(path, [Mistake(("step_ms",), "is missing; make the file with forebay simulate --calibrate")])
    found, mistakes = validated(Source({"step_ms": figures}), _Calibration)
    if found is None:
        raise ConfigErrors(path, mistakes)
    return StepTime.of(found.step_ms)


class _Calibration(Part):
    step_ms: StepCost
