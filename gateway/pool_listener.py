"""What a pool tells its model's dispatcher."""

from __future__ import annotations

from typing import Protocol

from gateway.worker_handle import WorkerHandle, WorkerLoss
from workers.protocol import StepOutputs


class PoolListener(Protocol):
    """Hears of a pool's workers. All calls come on the event loop, one at a time, and must not block.

    Per handle: ``on_ready`` once, then any number of ``on_outputs``, then ``on_lost`` once; nothing after it.
    A start that fails is no loss: there was no ``on_ready``. An exception from a listener is logged, never fatal.
    """

    def on_ready(self, handle: WorkerHandle) -> None:
        """``handle`` said Hello and may be sent work."""
        ...

    def on_outputs(self, handle: WorkerHandle, outputs: StepOutputs) -> None:
        """News of one or several steps. The handle's own figures are already up to date."""
        ...

    def on_lost(self, handle: WorkerHandle, reason: WorkerLoss) -> None:
        """The worker is gone with everything in ``reason.inflight``; no output of those will come."""
        ...
