"""One token bucket: a level that fills at a constant rate up to its capacity, and may be in debt."""

from __future__ import annotations

from dataclasses import dataclass

PAD_S = 0.001
"""Added to computed waits, so that rounding never makes a caller who waited come a hair too early."""


@dataclass(slots=True)
class Bucket:
    """``limit`` units per ``window_s`` seconds, with a burst of one window's worth. Starts full."""

    limit: int
    level: float
    at: float
    window_s: float = 60.0

    @classmethod
    def full(cls, limit: int, now: float, window_s: float = 60.0) -> Bucket:
        """A new one."""
        return cls(limit, float(limit), now, window_s)

    def refill(self, now: float) -> None:
        """Bring the level up to date."""
        passed = now - self.at
        if passed > 0:
            level = self.level + passed * self.limit / self.window_s
            self.level = level if level < self.limit else float(self.limit)
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
        return missing * self.window_s / self.limit + PAD_S if missing > 0 else 0.0

    def take(self, cost: float) -> None:
        """Take; a negative cost gives back, never above the capacity. The level must be up to date."""
        level = self.level - cost
        self.level = level if level < self.limit else float(self.limit)

    def is_full(self, now: float) -> bool:
        """Whether nothing is lost by forgetting it."""
        self.refill(now)
        return self.level >= self.limit

    @property
    def left(self) -> int:
        """Whole units left."""
        return max(0, int(self.level))

    @property
    def reset_s(self) -> float:
        """Seconds until it is full."""
        return (self.limit - self.level) * self.window_s / self.limit
