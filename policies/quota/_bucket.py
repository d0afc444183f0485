"""One token bucket: a level that fills at a constant rate up to its capacity, and may be in debt."""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import LimitState

WINDOW_S = 60.0
"""Limits are per minute: an empty bucket is full again after one."""
PAD_S = 0.001
"""Added to computed waits, so that rounding never makes a caller who waited come a hair too early."""


@dataclass(slots=True)
class Bucket:
    """``limit`` units per minute, with a burst of one minute's worth. Starts full."""

    limit: int
    level: float
    at: float

    @classmethod
    def full(cls, limit: int, now: float) -> Bucket:
        """A new one."""
        return cls(limit, float(limit), now)

    def refill(self, now: float) -> None:
        """Bring the level up to date."""
        passed = now - self.at
        if passed > 0:
            self.level = min(float(self.limit), self.level + passed * self.limit / WINDOW_S)
            self.at = now

    def adopt(self, limit: int, now: float) -> None:
        """Take over a changed limit: what is left stays (less where the new capacity is smaller), nothing is added."""
        self.refill(now)
        if limit != self.limit:
            self.limit = limit
            self.level = min(self.level, float(limit))

    def wait(self, cost: float) -> float:
        """Seconds until ``cost`` can be taken, 0 when it can be now. The level must be up to date."""
        missing = cost - self.level
        return missing * WINDOW_S / self.limit + PAD_S if missing > 0 else 0.0

    def take(self, cost: float) -> None:
        """Take; a negative cost gives back, never above the capacity. The level must be up to date."""
        self.level = min(float(self.limit), self.level - cost)

    def is_full(self, now: float) -> bool:
        """Whether nothing is lost by forgetting it."""
        self.refill(now)
        return self.level >= self.limit

    def state(self) -> LimitState:
        """For headers: whole units left and seconds until it is full."""
        return LimitState(self.limit, max(0, int(self.level)), (self.limit - self.level) * WINDOW_S / self.limit)
