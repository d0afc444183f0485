"""Virtual time: picoseconds as whole numbers inside, seconds for whoever asks."""

from __future__ import annotations

PS_PER_S = 10**12


class Clock:
    """Called like ``time.monotonic``. Only the simulation moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""

    def __call__(self) -> float:
        return self.now

    def move(self, ps: int) -> float:
        """To ``ps`` picoseconds; never back. Returns the seconds."""
        self.now = max(self.now, ps / PS_PER_S)
        return self.now
