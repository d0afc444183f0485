"""A worker's circuit breaker: remembers faults, lets one probe per interval through, closes on the first success.

Rules
- Only a worker's own faults count (it broke, or it refuses everybody); what a caller did wrong never does, so that one
  tenant's malformed requests cannot take a worker away from the others.
- Pure: no clock, no I/O; the caller passes ``now`` (seconds, monotonic).
- closed → (``threshold`` faults in a row) → open for ``interval_s`` → one probe → closed, or open for twice as long,
  at most ``max_interval_s``.
"""

from __future__ import annotations


class Breaker:
    """Counts consecutive faults of one worker and says whether a request may go there now."""

    def __init__(self, threshold: int = 5, interval_s: float = 1.0, max_interval_s: float = 30.0) -> None:
        self._threshold = threshold
        self._first_interval_s = interval_s
        self._max_interval_s = max_interval_s
        self._interval_s = interval_s
        self._faults = 0
        self._retry_at: float | None = None
        self._probe: str | None = None

    @property
    def is_open(self) -> bool:
        """True from the fault that opened it until the first success afterwards."""
        return self._retry_at is not None

    @property
    def faults(self) -> int:
        """Faults since the last success."""
        return self._faults

    def allows(self, now: float) -> bool:
        """May one more request be sent? While open: only one at a time, once the interval is over."""
        return self._retry_at is None or (self._probe is None and now >= self._retry_at)

    def sent(self, request_id: str, now: float) -> None:
        """A request was sent; while open it is the probe."""
        if self._retry_at is not None and self._probe is None and now >= self._retry_at:
            self._probe = request_id

    def success(self) -> None:
        """The worker computed something for somebody: all is forgotten."""
        if self._faults or self._retry_at is not None:
            self._faults = 0
            self._retry_at = None
            self._probe = None
            self._interval_s = self._first_interval_s

    def neutral(self, request_id: str) -> None:
        """A request ended without saying anything about the worker (cancelled, malformed): the next may probe."""
        if self._probe == request_id:
            self._probe = None

    def fault(self, request_id: str, now: float) -> None:
        """The worker failed a request. Requests sent before it opened do not stretch the interval."""
        self._faults += 1
        if self._retry_at is None:
            if self._faults >= self._threshold:
                self._retry_at = now + self._interval_s
        elif self._probe == request_id:
            self._probe = None
            self._interval_s = min(self._interval_s * 2, self._max_interval_s)
            self._retry_at = now + self._interval_s
