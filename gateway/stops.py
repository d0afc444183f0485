"""Finding stop strings in text that arrives in pieces, and holding back what may become one.

Rules
- The first stop is the one that is complete first; of two that end on the same character, the longer. This makes the
  result independent of how the text was cut into pieces.
- Only the longest suffix that is a beginning of some stop string is held back; everything before it goes out at once.
"""

from __future__ import annotations


class StopMatcher:
    """Cuts one text at its first stop string."""

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False
        """A stop string was found: nothing comes out any more."""

    def push(self, piece: str) -> str:
        """Take the next piece, return the text that is safe to show."""
        if self.stopped:
            return ""
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        first = min(((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if first is not None:
            self.stopped = True
            self._held = ""
            return text[: first[1]]
        keep = self._suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text has ended: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _suffix(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins some stop string (and is not all of it)."""
        longest = 0
        for stop in self._stops:
            start = max(0, len(text) - len(stop) + 1)
            while (at := text.find(stop[0], start)) >= 0:
                if stop.startswith(text[at:]):
                    longest = max(longest, len(text) - at)
                    break
                start = at + 1
        return longest
