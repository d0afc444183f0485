"""One worker as the console, ``/admin/overview`` and the terminal show it: its last report as a frozen value.

Names of adapters are what the gateway calls them; a content that has no name any more is shown by its digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.adapters import Adapter
from gateway.worker_handle import WorkerHandle, WorkerState
from workers.protocol import WorkerStats

_NO_FAULT = ("ok", "stopped")
"""Ends of a transfer that are nobody's: it came, or its request was stopped."""
_DIGEST = 19
"""Characters of ``sha256:…`` that are enough to tell contents apart."""


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier of the prefix cache below the device. All but ``bytes`` and ``up`` count from the worker's start."""

    name: str
    bytes: int
    up: bool
    """Whether it is written to."""
    hit_tokens: int
    restored_blocks: int
    saved_blocks: int
    errors: int


@dataclass(frozen=True, slots=True)
class TransferRow:
    """What a decode worker got from prefill workers, since its start."""

    ok: int
    failed: int
    """Not all of the prompt came, so it was computed here; without requests that were stopped meanwhile."""
    mean_s: float
    """Of those that came: from the request's arrival to its last block, computing included."""
    others: tuple[tuple[str, int], ...]
    """Why not all came, most often first."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker."""

    name: str
    model: str
    pool: str
    role: str
    """``both``, ``prefill``, ``decode``; empty before it has said hello."""
    state: str
    set_aside: bool
    stale: bool
    device: str
    dtype: str
    labels: Mapping[str, str]
    starts: int
    inflight: int
    """Sequences that it was sent and that have not ended."""
    running: int
    max_running: int
    waiting: int
    preemptions: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    hit_rate: float | None
    """Prompt tokens found in the prefix cache over those looked up, since its start; None before the first."""
    acceptance: float | None
    """Guesses of speculative decoding that were right over all that were checked; None before the first."""
    step_ms: float
    tenants: tuple[tuple[str, int], ...]
    """KV blocks by tenant, computed from the running requests' tokens; most first."""
    cached_tenants: tuple[tuple[str, int], ...]
    """Cached blocks by tenant, of those that have most, most first; what belongs to nobody known is ``other``."""
    tiers: tuple[TierRow, ...]
    transfers: TransferRow | None
    """None before the first."""
    adapters: tuple[str, ...]
    """LoRA adapters that it holds."""
    last_loss: str | None

    @property
    def can_drain(self) -> bool:
        """Whether draining it means anything."""
        return self.state == WorkerState.READY


def worker_row(
    handle: WorkerHandle,
    described: Mapping[str, Any],
    tenants: Mapping[str, int],
    cached: Mapping[str, int],
    adapters: Iterable[Adapter],
) -> WorkerRow:
    """``described`` is the pool's snapshot of it; blocks by tenant in use and cached; all adapters that have names."""
    stats, hello = handle.stats, handle.hello
    loss = described.get("last_loss")
    guesses = stats.drafts_accepted + stats.drafts_rejected
    return WorkerRow(
        name=handle.name,
        model=handle.model,
        pool=handle.pool,
        role=hello.role if hello else "",
        state=str(handle.state),
        set_aside=described["set_aside"],
        stale=described["stale"],
        device=hello.device if hello else "",
        dtype=hello.dtype if hello else "",
        labels=dict(handle.labels),
        starts=handle.incarnation,
        inflight=handle.inflight,
        running=stats.running,
        max_running=stats.max_running or (hello.max_running if hello else 0),
        waiting=stats.waiting,
        preemptions=stats.preemptions,
        free_blocks=stats.free_blocks,
        cached_blocks=stats.cached_blocks,
        used_blocks=stats.used_blocks,
        hit_rate=stats.hit_tokens / stats.query_tokens if stats.query_tokens else None,
        acceptance=stats.drafts_accepted / guesses if guesses else None,
        step_ms=stats.step_ms,
        tenants=_most_first(tenants),
        cached_tenants=_most_first(cached),
        tiers=_tiers(stats),
        transfers=_transfers(stats),
        adapters=_names(handle, adapters),
        last_loss=None if loss is None else f"{loss['kind']}: {loss['detail']}".removesuffix(": "),
    )


def _tiers(stats: WorkerStats) -> tuple[TierRow, ...]:
    return tuple(
        TierRow(name, tier.bytes, tier.up, tier.hit_tokens, tier.restored_blocks, tier.saved_blocks, tier.errors)
        for name, tier in stats.tiers.items()
    )


def _transfers(stats: WorkerStats) -> TransferRow | None:
    if not stats.transfers:
        return None
    ok, seconds = stats.transfers.get("ok", (0, 0.0))
    others = {why: count for why, (count, _) in stats.transfers.items() if why != "ok"}
    failed = sum(count for why, count in others.items() if why not in _NO_FAULT)
    return TransferRow(ok, failed, seconds / ok if ok else 0.0, _most_first(others))


def _names(handle: WorkerHandle, adapters: Iterable[Adapter]) -> tuple[str, ...]:
    named: dict[str, list[str]] = {}
    for adapter in adapters:
        if adapter.model == handle.model and adapter.digest is not None:
            named.setdefault(adapter.digest, []).append(adapter.name)
    held = handle.adapters.held
    known = sorted(name for digest in held for name in named.get(digest, ()))
    return (*known, *sorted(digest[:_DIGEST] for digest in held if digest not in named))


def _most_first(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
