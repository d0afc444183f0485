"""The engine's part in handing prompts over: what it lends to other workers, what it gets from them.

``workers.transfer`` tells the whole; ``leases.py`` and ``arrivals.py`` have the rules. Without a mover it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.config import EngineConfig
from workers.engine.arrivals import Arrivals, Arrived, HandedOver
from workers.engine.block_pool import BlockPool
from workers.engine.leases import BlockMover, GiveBack, Leases, Offer, ReadBlocks
from workers.protocol import Generate, Purge, SequenceOutput

Transferred = ReadBlocks | GiveBack | Arrived | HandedOver
"""What other workers' desks say to the engine."""


class Handover:
    """Of one engine; both roles in one, since neither costs anything while nobody asks."""

    def __init__(
        self,
        pool: BlockPool,
        mover: BlockMover | None,
        config: EngineConfig,
        revision: str,
        zero: Callable[[list[int]], None],
        on_offer: Callable[[str, Offer | None], None],
    ) -> None:
        """``zero`` as for ``Arrivals``, ``on_offer`` as for ``Leases``."""
        self._leases: Leases | None = None
        self._arrivals: Arrivals | None = None
        if mover is not None:
            self._leases = Leases(
                pool,
                mover,
                block_size=config.block_size,
                revision=revision,
                lease_ns=int(config.transfer.lease_s * 1e9),
                on_offer=on_offer,
            )
            self._arrivals = Arrivals(pool, mover, zero)

    @property
    def leases(self) -> int:
        """How many tickets somebody may still show."""
        return 0 if self._leases is None else len(self._leases)

    def expect(self, generate: Generate) -> None:
        """A request came."""
        if self._leases is not None:
            self._leases.expect(generate)

    def told(self, output: SequenceOutput, now: int) -> SequenceOutput:
        """An output as it goes to the gateway; before the next plan is made."""
        if self._leases is not None:
            self._leases.ended(output, now)
        return output if self._arrivals is None else self._arrivals.told(output)

    def handle(self, message: Transferred) -> Generate | None:
        """Serve a desk. Returns a request that may run now."""
        assert self._leases is not None, "no mover, no desk"
        assert self._arrivals is not None
        if isinstance(message, HandedOver):
            self._arrivals.note(message)
            return message.generate
        if isinstance(message, Arrived):
            self._arrivals.place(message)
        else:
            self._leases.handle(message)
        return None

    def purge(self, purge: Purge) -> None:
        """Before a purge."""
        if self._leases is not None:
            self._leases.purge(purge)

    def sweep(self, now: int) -> None:
        """End what is too old."""
        if self._leases is not None:
            self._leases.sweep(now)
