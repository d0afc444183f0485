"""Virtual time: picoseconds as whole numbers inside, seconds for whoever asks."""

from __future__ import annotations

import math

PS_PER_S = 10**12


class Clock:
    """Called like ``time.monotonic``. Only the simulation moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> int:
        """The first picosecond from now on that is not before ``seconds`` when it is asked for in seconds."""
        ps = max(math.ceil(seconds * PS_PER_S), round(self.now * PS_PER_S))
        while ps / PS_PER_S < seconds:
            ps += 1
        return ps

    def move(self, ps: int) -> float:
        """To ``ps`` picoseconds; never back. Returns the seconds."""
        self.now = max(self.now, ps / PS_PER_S)
        return self.now
