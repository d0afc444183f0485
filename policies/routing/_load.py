"""How loaded a worker is, for comparisons."""

from __future__ import annotations

from collections.abc import Sequence

from policies.types import WorkerView


def load(worker: WorkerView) -> tuple[float, float, str]:
    """Sort key: share of its running slots in use (waiting sequences included), then of its cache, then the name.

    ``inflight`` is the gateway's own count and therefore never stale.
    """
    slots = max(worker.inflight, worker.waiting) / max(1, worker.max_running)
    capacity = worker.total_blocks * worker.block_size // max(1, len(worker.keeps))
    return slots, worker.inflight_tokens / capacity if capacity else float(worker.inflight_tokens), worker.name


def least(workers: Sequence[WorkerView]) -> WorkerView:
    """The least loaded of them."""
    return min(workers, key=load) if len(workers) > 1 else workers[0]


def reason(workers: Sequence[WorkerView]) -> str:
    """``only`` where there was no choice, else ``load``."""
    return "only" if len(workers) == 1 else "load"
