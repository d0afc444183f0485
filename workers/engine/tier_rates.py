"""Whether bringing blocks back costs less than computing them again, from what both have cost so far.

Rules
- Measured, never guessed: nanoseconds per prompt token from steps that computed prompts, per block and tier from moves.
  While one of the two is unknown, bringing back is worth trying: that measures it.
- Figures are exponential means. A refusal makes the tier's figure a little smaller, so that one slow reading (a cold
  disk, a busy machine) is not believed for ever.
- Pure: whoever measures says so; nobody reads a clock here.
"""

from __future__ import annotations

KEEP = 0.8
"""Weight of the past in a mean."""
FADE = 0.98
MIN_TOKENS = 32
"""Steps with fewer tokens say little about the cost of a prompt."""
HOST, DISK = "host", "disk"


class Rates:
    """Of one engine. ``block_tokens``: what computing a block again would compute."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.token_ns = 0.0
        """Computing one prompt token; 0 until known."""
        self.block_ns: dict[str, float] = {}
        """Moving one block between the device and the host, or reading one from the disk."""

    def computed(self, tokens: int, ns: float) -> None:
        """A step computed ``tokens`` in ``ns``, moves not counted."""
        if tokens >= MIN_TOKENS and ns > 0:
            self.token_ns = _mean(self.token_ns, ns / tokens)

    def moved(self, tier: str, blocks: int, ns: float) -> None:
        """``blocks`` were moved in ``ns``."""
        if blocks > 0 and ns > 0:
            self.block_ns[tier] = _mean(self.block_ns.get(tier, 0.0), ns / blocks)

    def pays(self, tier: str, blocks: int, *, queued: int = 0, tokens: int | None = None) -> bool:
        """Whether ``blocks`` come back from ``tier`` sooner than their ``tokens`` (default: all) are computed.

        ``queued``: blocks that must be moved before. What comes from the disk passes through the host.
        """
        known = self.block_ns.get(tier, 0.0)
        if not known or not self.token_ns:
            return True
        each = known + (self.block_ns.get(HOST, 0.0) if tier == DISK else 0.0)
        if each * (blocks + queued) < self.recompute_ns(blocks, tokens):
            return True
        self.block_ns[tier] = known * FADE
        return False

    def recompute_ns(self, blocks: int, tokens: int | None = None) -> float:
        """What computing them again would take; 0 while unknown."""
        return self.token_ns * (blocks * self._block_tokens if tokens is None else tokens)


def _mean(past: float, new: float) -> float:
    return new if not past else KEEP * past + (1 - KEEP) * new
