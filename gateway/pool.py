"""A pool: a set of equal workers of one model. Starts, connects, watches, replaces them; tells the dispatcher.

What a dispatcher uses (see ``gateway.worker_handle`` and ``gateway.pool_listener`` for the details):

- ``PoolListener``: the dispatcher implements ``on_ready(handle)``, ``on_outputs(handle, outputs)``,
  ``on_lost(handle, reason: WorkerLoss)``.
- ``WorkerHandle``: ``available(now)``, ``view(now)``, ``send(message)``, ``flush()``, ``inflight``, ``is_stale(now)``,
  ``state``, ``hello``.
- ``Pool``: ``start()``, ``wait_ready(count)``, ``ready`` (handles), ``snapshot()``, ``stop(drain_s)``.

Rules
- Workers of a pool are equal: same weights, tokenizer and block size. One that differs from those that are ready, or
  whose tokenizer is not the gateway's, is refused and tried again later.
- Stopping is draining first: no new requests, those in flight get ``drain_s`` seconds, then the workers are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from gateway.pool_listener import PoolListener
from gateway.settings import Pool as PoolConfig
from gateway.worker_handle import LossKind, WorkerGoneError, WorkerHandle, WorkerLoss, WorkerState
from gateway.worker_slot import SlotOptions, WorkerSlot
from workers.launchers.base import Launcher, WorkerSpec
from workers.protocol import Hello, StepOutputs

__all__ = [
    "LossKind",
    "Pool",
    "PoolListener",
    "SlotOptions",
    "WorkerGoneError",
    "WorkerHandle",
    "WorkerLoss",
    "WorkerState",
]


_CONNECTED = (WorkerState.READY, WorkerState.DRAINING)


class Pool:
    """The workers of one ``pools:`` entry of one model. Belongs to the event loop."""

    def __init__(
        self,
        model: str,
        source: str,
        config: PoolConfig,
        launcher: Launcher,
        listener: PoolListener,
        *,
        options: SlotOptions | None = None,
        tokenizer_sha256: Callable[[], str | None] = lambda: None,
        base_dir: str = ".",
        worker_env: Mapping[str, str] | None = None,
        architectures: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``source``: what the workers load. ``tokenizer_sha256``: the gateway's, once known; workers must have it too.

        ``base_dir``: the YAML's folder. ``worker_env``: added to the environment of workers that are started here
        (``workers.collector.worker_environment``). ``architectures``: see ``WorkerSpec``.
        """
        self.model = model
        self.name = config.name
        self._on_disk = config.engine.disk_tier is not None
        self._tokenizer_sha256 = tokenizer_sha256
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._slots = [
            WorkerSlot(
                WorkerSpec(
                    name=f"{model}/{config.name}-{index}",
                    index=index,
                    model=model,
                    source=source,
                    engine=config.engine,
                    base_dir=base_dir,
                    env=dict(worker_env or {}),
                    architectures=dict(architectures or {}),
                    place=f"models[{model}].pools[{config.name}]",
                ),
                launcher,
                _Notifying(listener, self._changed),
                self._objection,
                pool=config.name,
                labels=dict(config.labels),
                classes=frozenset(config.classes),
                options=options or SlotOptions(),
                clock=clock,
                draw=draw,
            )
            for index in range(config.launch.count)
        ]

    @property
    def handles(self) -> list[WorkerHandle]:
        """Every place's current worker, ready or not."""
        return [slot.handle for slot in self._slots]

    @property
    def ready(self) -> list[WorkerHandle]:
        """Workers that take requests."""
        return [handle for handle in self.handles if handle.state is WorkerState.READY]

    @property
    def connected(self) -> list[WorkerHandle]:
        """Workers that hear what is sent to them: the ready ones, and those that drain."""
        return [handle for handle in self.handles if handle.state in _CONNECTED]

    @property
    def out_of_reach(self) -> list[str]:
        """Names of workers that nobody is connected to and whose cache may live all the same: with a process that is
        none of ours, or on a disk."""
        return [
            slot.handle.name
            for slot in self._slots
            if (slot.foreign or self._on_disk) and slot.handle.state not in _CONNECTED
        ]

    def start(self) -> None:
        """Begin to start the workers; does not wait for them."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(slot.run()) for slot in self._slots]

    async def wait_ready(self, count: int | None = None, timeout_s: float | None = None) -> None:
        """Return when ``count`` workers (default: all) are ready. Raises TimeoutError."""
        wanted = len(self._slots) if count is None else count
        async with asyncio.timeout(timeout_s):
            while len(self.ready) < wanted:
                self._changed.clear()
                await self._changed.wait()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Drain for at most ``drain_s`` seconds, then end every worker. Returns when all are gone."""
        for handle in self.handles:
            handle.draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while any(handle.inflight for handle in self.handles):
                    self._changed.clear()
                    await self._changed.wait()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    def snapshot(self) -> list[dict[str, Any]]:
        """The workers for ``/admin/workers``, as JSON values. Addresses are the operator's, never a caller's."""
        now = self._clock()
        return [_describe(slot, now) for slot in self._slots]

    def _objection(self, hello: Hello) -> str | None:
        """What makes this worker unequal to the others, or None."""
        ours = self._tokenizer_sha256()
        if ours and hello.tokenizer_sha256 and hello.tokenizer_sha256 != ours:
            return "the worker's tokenizer is not the gateway's: give both the same model source"
        for other in self.ready:
            for field in ("model_revision", "tokenizer_sha256", "block_size"):
                mine, theirs = getattr(hello, field), getattr(other.hello, field)
                if mine != theirs:
                    return f"{field} is {mine!r}, that of {other.name} is {theirs!r}: workers of a pool must be equal"
        return None


class _Notifying:
    """Passes a slot's events on and wakes who waits for the pool."""

    def __init__(self, listener: PoolListener, changed: asyncio.Event) -> None:
        self._listener = listener
        self._changed = changed

    def on_ready(self, handle: WorkerHandle) -> None:
        self._changed.set()
        self._listener.on_ready(handle)

    def on_outputs(self, handle: WorkerHandle, outputs: StepOutputs) -> None:
        self._changed.set()
        self._listener.on_outputs(handle, outputs)

    def on_lost(self, handle: WorkerHandle, reason: WorkerLoss) -> None:
        self._changed.set()
        self._listener.on_lost(handle, reason)


def _describe(slot: WorkerSlot, now: float) -> dict[str, Any]:
    handle, hello, stats = slot.handle, slot.handle.hello, slot.handle.stats
    described: dict[str, Any] = {
        "name": handle.name,
        "model": handle.model,
        "pool": handle.pool,
        "labels": dict(handle.labels),
        "state": str(handle.state),
        "set_aside": handle.breaker.is_open,
        "starts": handle.incarnation,
        "address": slot.address,
        "inflight": handle.inflight,
        "inflight_tokens": handle.inflight_tokens,
        "running": stats.running,
        "waiting": stats.waiting,
        "preemptions": stats.preemptions,
        "drafts": {"accepted": stats.drafts_accepted, "rejected": stats.drafts_rejected},
        "kv_blocks": {"free": stats.free_blocks, "cached": stats.cached_blocks, "used": stats.used_blocks},
        "adapters": sorted(handle.adapters.held),
        "tiers": {name: {"bytes": tier.bytes, "up": tier.up} for name, tier in stats.tiers.items()},
        "transfers": {result: count for result, (count, _) in stats.transfers.items()},
        "stale_s": round(handle.stale_s(now), 3),
        "stale": handle.is_stale(now),
    }
    if hello is not None:
        described |= {
            "pid": hello.pid,
            "metrics_port": hello.metrics_port,
            "role": hello.role,
            "device": hello.device,
            "ranks": hello.ranks,
            "dtype": hello.dtype,
            "model_revision": hello.model_revision,
            "block_size": hello.block_size,
            "blocks": hello.blocks,
            "max_running": stats.max_running or hello.max_running,
            "max_context": hello.max_context,
            "weight_bytes": hello.weight_bytes,
            "kv_bytes_per_token": hello.kv_bytes_per_token,
            "versions": dict(hello.versions),
        }
    if slot.last_loss is not None:
        loss = slot.last_loss
        described["last_loss"] = {
            "kind": str(loss.kind),
            "detail": loss.detail,
            "exit_code": loss.exit_code,
            "signal": loss.signal,
            "inflight": len(loss.inflight),
        }
    return described
