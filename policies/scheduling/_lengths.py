"""How long an answer will be: from a tenant's recent answers of the same model.

Rules
- A prediction is never above the job's ``max_tokens``, and is that where nothing was learnt yet.
- One learns from final charges only, of jobs that were begun here: a job of which a part was reported to another policy
  before a swap would look short.
- Memory is bounded: ``WINDOW`` lengths for each of the ``MAX_SERIES`` (tenant, model) pairs heard of last.
- A wrong prediction is corrected by what runs (``_tariff.Prepaid``): it moves work in time, not between tenants.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Mapping
from math import ceil
from typing import Any, Literal

from pydantic import Field

from policies.scheduling._tariff import TariffConfig
from policies.types import Job, JobId, TenantId

WINDOW = 32
MAX_SERIES = 4096
_ALPHA = 0.2
"""Weight of the newest length in the moving mean."""

Predict = Literal["none", "max", "mean", "quantile"]


class PredictingConfig(TariffConfig):
    """How output is predicted at dispatch: not at all, as ``max_tokens``, from the recent mean, or from a quantile."""

    predict: Predict = "mean"
    quantile: float = Field(0.8, gt=0, lt=1)

    def lengths(self) -> Lengths:
        """A predictor that has learnt nothing."""
        return Lengths(self.predict, self.quantile)


class _Series:
    """Recent lengths of one tenant and model; ``ranked``: also in order of size, where a quantile is asked for."""

    __slots__ = ("mean", "ranked", "recent")

    def __init__(self, first: int, *, ranked: bool) -> None:
        self.mean = float(first)
        self.recent = deque((first,), WINDOW)
        self.ranked = [first] if ranked else None

    def add(self, length: int) -> None:
        self.mean += _ALPHA * (length - self.mean)
        recent, ranked = self.recent, self.ranked
        if ranked is not None:
            if len(recent) == WINDOW:
                del ranked[bisect_left(ranked, recent[0])]
            insort(ranked, length)
        recent.append(length)


class Lengths:
    """See the module's rules. O(1) per call: ``WINDOW`` is a small constant."""

    __slots__ = ("_produced", "_quantile", "_series", "learns", "predict")

    def __init__(self, predict: Predict = "mean", quantile: float = 0.8) -> None:
        self.predict = predict
        self._quantile = quantile
        self.learns = predict in ("mean", "quantile")
        """Whether it needs to hear of what runs."""
        self._series: OrderedDict[tuple[TenantId, str], _Series] = OrderedDict()
        self._produced: dict[JobId, int] = {}

    def expect(self, job: Job) -> int:
        """Output tokens that the job is expected to produce."""
        most = job.max_tokens
        if not self.learns:
            return 0 if self.predict == "none" else most
        series = self._series.get((job.tenant, job.model))
        if series is None:
            return most
        ranked = series.ranked
        expected = ceil(series.mean) if ranked is None else ranked[int(self._quantile * len(ranked))]
        return expected if expected < most else most

    def start(self, job: Job) -> None:
        """It is dispatched (again, perhaps)."""
        if self.learns:
            self._produced.setdefault(job.id, 0)

    def begin(self, job: Job) -> int:
        """``start``, and what it is expected to produce."""
        if self.learns:
            self._produced.setdefault(job.id, 0)
        elif self.predict == "none":
            return 0
        return self.expect(job)

    def note(self, job: Job, output: int, final: bool) -> None:
        """It produced ``output`` more tokens."""
        if final:
            so_far = self._produced.pop(job.id, None)
            if so_far is not None:
                length = so_far + output
                self._learn(job.tenant, job.model, length if length > 0 else 0)
        elif output and job.id in self._produced:
            self._produced[job.id] += output

    def forget(self, job_id: JobId) -> None:
        """A returned job left the queue without running again."""
        self._produced.pop(job_id, None)

    def dump(self) -> list[list[Any]]:
        """The shared key ``lengths``."""
        return [[tenant, model, list(series.recent)] for (tenant, model), series in self._series.items()]

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace what was learnt by a dump's ``lengths``, if it has them. Raises ValueError when malformed."""
        rows = state.get("lengths", [])
        if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
            raise ValueError("'lengths' must be a list of [tenant, model, list of lengths]")
        self._series.clear()
        for tenant, model, lengths in rows:
            for length in lengths[-WINDOW:]:
                self._learn(TenantId(tenant), model, length)

    def _learn(self, tenant: TenantId, model: str, length: int) -> None:
        key = (tenant, model)
        series = self._series.get(key)
        if series is None:
            self._series[key] = _Series(length, ranked=self.predict == "quantile")
            if len(self._series) > MAX_SERIES:
                self._series.popitem(last=False)
        else:
            self._series.move_to_end(key)
            series.add(length)


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list | tuple)
        and len(row) == 3
        and isinstance(row[0], str)
        and isinstance(row[1], str)
        and isinstance(row[2], list)
        and all(isinstance(length, int) and length >= 0 for length in row[2])
    )
