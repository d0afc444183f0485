"""What a worker says of the tiers of its prefix cache, in every report (``WorkerStats.tiers``)."""

from __future__ import annotations

import msgspec


class TierStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tier of the prefix cache below the device's memory. All but ``bytes`` and ``up`` are cumulative."""

    bytes: int = 0
    """Held now."""
    hit_tokens: int = 0
    """Prompt tokens that were found here."""
    restored_blocks: int = 0
    saved_blocks: int = 0
    errors: int = 0
    """Files that could not be written, or were not what they should be."""
    up: bool = True
    """Whether it is written to; a disk that is full or unwritable is left alone for a while."""
    early_blocks: int = 0
    """Read because of a ``Prefetch``."""
