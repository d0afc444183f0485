"""Which pools of a model may run a request now: shares by weight, canaries, and fallbacks by order and by reason.

Rules
- A pool is *ordinary*, a *canary* (for a fixed part of the callers) or a *fallback* (for nobody, unless one of its
  reasons holds). Labels and classes come first and last: no rule here sends a request where it must not go,
  nor to a server that does not offer its endpoint.
- A canary's callers go there while one of its workers is ready, and to the ordinary pools otherwise, or when it failed
  them.
- A fallback takes a request when one of its reasons holds for the pools before it: ``lost`` (no worker is ready, or an
  attempt failed), ``context`` (none holds it), ``overload`` (it waited ``fallback_after_s``, or a worker turned it away
  as too busy). Room in an ordinary pool goes first all the same, and fallbacks are asked in their order.
- A worker that failed a request, or turned it away, does not get it again while another one may.
- Weights divide among ordinary pools with room, by requests: work goes on where there is room, and a pool that was away
  is owed at most ``MAX_LAG`` requests afterwards.
- Pure but for the shares: asked on the event loop, in O(workers of the model). A model whose pools say nothing of all
  this, and a request that was never turned away, cost nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from gateway.asking import unaskable
from gateway.gate import Room, holds, takes
from gateway.prefill import Prefill
from gateway.settings import Pool
from gateway.ticket import Ticket
from gateway.worker_handle import WorkerHandle, WorkerState
from policies.types import Job, WorkerView

MAX_LAG = 16.0
_CIRCLE = 2.0**64


def in_canary(model: str, pool: str, percent: float, caller: str) -> bool:
    """Whether ``caller`` is among the ``percent`` of callers that the pool takes. The same answer always."""
    digest = hashlib.sha256(b"\0".join(part.encode("utf-8", "surrogatepass") for part in (model, pool, caller)))
    return int.from_bytes(digest.digest()[:8], "big") / _CIRCLE < percent / 100


class PoolRoles:
    """One model's pools."""

    def __init__(
        self, model: str, pools: Sequence[Pool], workers: Mapping[str, WorkerHandle], prefill: Prefill
    ) -> None:
        """``workers``: those that are connected, by name."""
        self._prefill = prefill
        self._model = model
        self._workers = workers
        pools = [pool for pool in pools if pool.engine.role != "prefill"]
        self._canaries = [pool for pool in pools if pool.canary is not None]
        self._fallbacks = [pool for pool in pools if pool.fallback]
        special = {pool.name for pool in (*self._canaries, *self._fallbacks)}
        self._ordinary = frozenset(pool.name for pool in pools if pool.name not in special)
        weights = {pool.name: pool.weight for pool in pools if pool.weight is not None}
        self._weights = {name: weights.get(name, 1.0) for name in self._ordinary} if weights else {}
        self._given = dict.fromkeys(self._weights, 0.0)
        self._rank = {pool.name: rank for rank, pool in enumerate(self._fallbacks, 1)}
        self._plain = not (special or self._weights)

    def may(self, ticket: Ticket, worker: WorkerView, now: float) -> bool:
        """Whether the request may go to this worker now, as far as pools are concerned."""
        target = self._workers[worker.name]
        if not _offers(target, ticket) or not self._prefill.may(ticket, target, now):
            return False
        if self._plain and not ticket.moved_on:
            return True
        pools = self._pools(ticket, now)
        if worker.pool not in pools:
            return False
        return worker.name not in self._tried(ticket) or not self._others(ticket, pools)

    def has_room(self, ticket: Ticket, rooms: Sequence[Room], now: float) -> bool:
        """Whether one of the rooms would take the request now."""
        return any(
            room.fits(ticket.job, ticket.lines, suspect=ticket.suspect) and self.may(ticket, room.reported, now)
            for room in rooms
        )

    def elsewhere(self, ticket: Ticket, now: float) -> bool:
        """Whether another worker than those that had it could take the request that was just turned away."""
        return self._others(ticket, self._pools(ticket, now))

    def narrowed(self, ticket: Ticket, rooms: list[Room], now: float) -> list[Room]:
        """The rooms among which the routing policy chooses: of the first pools in order that have any, and of the one
        whose turn it is where they have weights. ``rooms`` all fit, and one of them will be taken."""
        rooms = [room for room in rooms if self.may(ticket, room.reported, now)]
        if self._plain:
            return rooms
        first = min(self._rank.get(room.reported.pool, 0) for room in rooms)
        rooms = [room for room in rooms if self._rank.get(room.reported.pool, 0) == first]
        pools = {room.reported.pool for room in rooms}
        if not pools <= self._weights.keys():
            return rooms
        chosen = self._turn(pools)
        return [room for room in rooms if room.reported.pool == chosen]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _pools(self, ticket: Ticket, now: float) -> set[str]:
        """Pools that may run it now."""
        if self._plain:
            return set(self._ordinary)
        job, failed = ticket.job, ticket.retries > 0
        canary = self._canary(job)
        pools = {canary} if canary is not None else set(self._ordinary)
        if canary is not None and (ticket.moved_on or not self._ready(ticket, pools)):
            pools |= self._ordinary
        for pool in self._fallbacks:
            ready = self._ready(ticket, pools)
            held = [worker for worker in ready if _holds(worker, ticket)]
            waited = now - ticket.queued_at >= pool.fallback_after_s
            reasons = {
                "lost": failed or not ready,
                "context": "context" in ticket.turned_away or (bool(ready) and not held),
                "overload": "overload" in ticket.turned_away or (bool(held) and waited),
            }
            if any(reasons[reason] for reason in pool.fallback):
                pools.add(pool.name)
        return pools

    def _canary(self, job: Job) -> str | None:
        for pool in self._canaries:
            assert pool.canary is not None
            caller = job.tenant if pool.canary.by == "tenant" or job.user is None else f"{job.tenant}\0{job.user}"
            if in_canary(self._model, pool.name, pool.canary.percent, caller):
                return pool.name
        return None

    def _ready(self, ticket: Ticket, pools: set[str]) -> list[WorkerHandle]:
        """Workers of ``pools`` that take requests like this one and are not set aside for their faults."""
        return [
            worker
            for worker in self._workers.values()
            if worker.pool in pools
            and _offers(worker, ticket)
            and worker.state is WorkerState.READY
            and not worker.breaker.is_open
            and takes(worker, ticket.job)
        ]

    def _tried(self, ticket: Ticket) -> set[str]:
        """Workers that had it and live on: a restarted one is another."""
        if not ticket.moved_on:
            return set()
        return {worker.name for worker in ticket.ran_on if worker.state is not WorkerState.DOWN}

    def _others(self, ticket: Ticket, pools: set[str]) -> bool:
        tried = self._tried(ticket)
        return any(worker.name not in tried and _holds(worker, ticket) for worker in self._ready(ticket, pools))

    def _turn(self, pools: set[str]) -> str:
        """The pool that has had least of its share; it has one request more now."""
        chosen = min(sorted(pools), key=lambda pool: self._given[pool] + 1 / self._weights[pool])
        self._given[chosen] += 1 / self._weights[chosen]
        level = self._given[chosen]
        for pool, weight in self._weights.items():
            self._given[pool] = max(self._given[pool], level - MAX_LAG / weight)
        return chosen


def _holds(worker: WorkerHandle, ticket: Ticket) -> bool:
    return worker.hello is not None and holds(worker.hello.longest, ticket.job, ticket.lines)


def _offers(worker: WorkerHandle, ticket: Ticket) -> bool:
    """Whether it runs requests of this kind: a prefill worker none; an engine generates, an upstream says what,
    and is asked for nothing that has no name there."""
    request, hello = ticket.prepared.request, worker.hello
    if hello is not None and hello.role == "prefill":
        return False
    if hello is None or not hello.upstream:
        return request.endpoint != "embeddings"
    return request.endpoint in hello.endpoints and unaskable(request) is None
