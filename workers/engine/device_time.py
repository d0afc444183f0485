"""Where a device's time went: by kind for the worker, by request for who pays.

Rules
- The engine thread is the only writer. Nothing here has a clock of its own.
- From ``begin`` on every nanosecond is in exactly one kind, so the kinds add up to wall time: a step's time runs from
  the end of the one before, with its planning; only waiting for work is ``idle``.
- A step's time is shared by its tokens: each chunk pays its part, and the part of it that was computed before is
  ``recompute``. A step that failed is ``retry`` for all that were in it.
- Moving blocks between tiers is ``offload``, moving them between workers ``transfer``: nobody's tokens, so they are
  taken out of the step or the wait in which they happened before that is shared.
- What a request took is told once, with the next end of one of its sequences. Rounding is in the kinds, never lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from workers.engine.plan import StepPlan
from workers.protocol import SequenceOutput

REPORT_NS = 500_000_000
"""The kinds are told at most so often."""
COMPUTED, RECOMPUTE, RETRY = range(3)
T = TypeVar("T")


class DeviceTime:
    """Of one engine."""

    def __init__(self) -> None:
        self.kinds = {"computed": 0, "recompute": 0, "retry": 0, "offload": 0, "transfer": 0, "idle": 0}
        """Nanoseconds since the begin."""
        self._aside: dict[str, int] = {}
        """What was moved since the mark, by kind."""
        self._mark: int | None = None
        self._told_at = 0
        self._requests: dict[str, list[int]] = {}

    def begin(self, now: int) -> None:
        """Count from now on; the first call counts."""
        if self._mark is None:
            self._mark = self._told_at = now

    def moved(self, kind: str, ns: int) -> None:
        """So much of the time since the last call was ``offload`` or ``transfer``."""
        self._aside[kind] = self._aside.get(kind, 0) + ns

    def moving(self, kind: str, work: Callable[[], T], clock: Callable[[], int]) -> T:
        """Do it, and count its time as ``kind``."""
        began = clock()
        done = work()
        self.moved(kind, clock() - began)
        return done

    def idle(self, now: int) -> None:
        """There was nothing to do until now."""
        self.kinds["idle"] += self._passed(now)

    def step(self, plan: StepPlan, now: int) -> None:
        """The step's results are there. Before they are booked: what was computed before is still known."""
        passed, tokens = self._passed(now), plan.tokens
        if not tokens:
            self.kinds["idle"] += passed
            return
        again_ns = 0
        for chunk in plan.chunks:
            sequence, start = chunk.sequence, chunk.start
            entry = self._requests.get(sequence.id)
            if entry is None:
                entry = self._requests[sequence.id] = [0, 0, 0]
            share = passed * chunk.count // tokens
            if start < sequence.high_water:
                again = min(start + chunk.count, sequence.high_water) - start
                part = share * again // chunk.count
                entry[RECOMPUTE] += part
                again_ns += part
                share -= part
            entry[COMPUTED] += share
        self.kinds["recompute"] += again_ns
        self.kinds["computed"] += passed - again_ns

    def failed(self, plan: StepPlan, now: int) -> None:
        """The step came to nothing."""
        passed, tokens = self._passed(now), plan.tokens
        self.kinds["retry"] += passed
        for chunk in plan.chunks:
            entry = self._requests.setdefault(chunk.sequence.id, [0, 0, 0])
            entry[RETRY] += passed * chunk.count // tokens

    def told(self, output: SequenceOutput) -> SequenceOutput:
        """``output``, with what its request took since the last time, if it is an end."""
        if output.finish is None:
            return output
        entry = self._requests.pop(output.id, None)
        return output if entry is None else replace(output, device_ns=(entry[0], entry[1], entry[2]))

    def due(self) -> dict[str, int]:
        """The kinds, when it is time to tell them again; else nothing."""
        if self._mark is None or self._mark - self._told_at < REPORT_NS:
            return {}
        self._told_at = self._mark
        return dict(self.kinds)

    def _passed(self, now: int) -> int:
        if self._mark is None:
            self._mark = self._told_at = now
        passed = max(0, now - self._mark)
        self._mark += passed
        if self._aside:
            for kind, ns in self._aside.items():
                ns = min(ns, passed)
                self.kinds[kind] += ns
                passed -= ns
            self._aside.clear()
        return passed
