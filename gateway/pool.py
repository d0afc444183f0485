"""A pool: a set of equal workers of one model. Starts, connects, watches, replaces them; tells the dispatcher.

What a dispatcher uses (see ``gateway.worker_handle`` for the details):

- ``PoolListener``: the dispatcher implements ``on_ready(handle)``, ``on_outputs(handle, outputs)``,
  ``on_lost(handle, reason: WorkerLoss)``.
- ``WorkerHandle``: ``available(now)``, ``view(now)``, ``send(message)``, ``inflight``, ``is_stale(now)``,
  ``state``, ``hello``.
- ``Pool``: ``start()``, ``wait_ready(count)``, ``ready`` (handles), ``snapshot()``, ``stop(drain_s)``.
"""

from __future__ import annotations

from gateway.worker_handle import (
    LossKind,
    PoolListener,
    WorkerGoneError,
    WorkerHandle,
    WorkerLoss,
    WorkerState,
)

__all__ = ["LossKind", "PoolListener", "WorkerGoneError", "WorkerHandle", "WorkerLoss", "WorkerState"]
