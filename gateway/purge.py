"""Making cached prefixes unreachable and zeroing them, with a receipt: of a tenant, or of its users, groups, documents.

Rules
- A whole tenant: the epoch is bumped (and written down) first. From that moment no request can reach an old block,
  whatever becomes of the sweep.
- Users, groups and tags: blocks bear labels (``labels.py``), which the sweep names. Where a worker cannot be reached,
  its blocks could be hit again: then the tenant's epoch is bumped as well, and all of the tenant is swept.
- Every connected worker is asked, also one that drains, all at once, each in its own time. One that does not answer is
  named, and so is one that may run while nobody is connected to it: its blocks stay unreachable until it is gone.
- The sweep of a tenant names scopes. Where more were used than are remembered (``scopes.py``), the receipt says so.
- A request that began before a purge and runs on after it is swept up behind (``sweep_behind``).
- A receipt is signed with the server's secret, so that it can be shown to be this gateway's. It is kept (bounded) and
  follows what was in use at the purge to its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway import log
from gateway.desk import try_send
from gateway.labels import Labels, Subject
from gateway.pool import Pool, WorkerGoneError, WorkerHandle, WorkerState
from gateway.tenants import EffectiveTenant, Tenants
from gateway.ticket import Ticket
from policies.types import TenantId
from workers.protocol import Purge, Purged

_log = log.get("purge")

KEPT_RECEIPTS = 1024
DEVICE = "device"
"""The tier that every engine has; those below it have their names from ``engine.tiers``."""
_CHECKS = {
    "failed": "a worker did not answer",
    "upstream": "an upstream keeps a cache of its own, which cannot be zeroed from here",
    "pending": "running requests still use some blocks, or files are not unlinked yet; they go when that is over",
    "forgotten": "more cache scopes were used than are remembered; what is cached under the others is unreachable, but "
    "not zeroed before it is reused. Restart the workers to be sure",
    "unsaved": "the new epoch could not be written to state.path: it is lost with this process",
}


@dataclass(slots=True)
class Receipt:
    """What a purge did."""

    id: str
    tenant: str
    epoch: int
    """The tenant's epoch after it: what was cached under older ones cannot be reached any more."""
    at: float
    scopes: int
    subject: Mapping[str, list[str]] = field(default_factory=dict)
    """Users, groups and tags that were named; empty: the whole tenant."""
    widened: bool = False
    """Not only what was named was purged but all of the tenant, since a worker could not be reached."""
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    """Blocks zeroed or (on a disk) unlinked, by worker and tier."""
    in_use: dict[str, tuple[int, WorkerHandle]] = field(default_factory=dict)
    """Blocks that running requests still used, by worker; zeroed when these end."""
    failed: dict[str, str] = field(default_factory=dict)
    """Workers that did not answer, and why."""
    forgotten: bool = False
    """More scopes were used than are remembered: blocks of the others were not swept."""
    unsaved: bool = False
    """The new epoch is not on disk."""
    secret: bytes = field(default=b"", repr=False)

    @property
    def zeroed(self) -> dict[str, int]:
        """Blocks that are gone, by worker."""
        return {name: sum(tiers.values()) for name, tiers in self.tiers.items()}

    @property
    def pending(self) -> dict[str, int]:
        """Blocks still in use, by worker: none at one whose session ended, since its requests ended with it."""
        return {name: 0 if handle.state is WorkerState.DOWN else count for name, (count, handle) in self.in_use.items()}

    @property
    def complete(self) -> bool:
        """Whether nothing is left to zero."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why it is not complete, in words."""
        failures = set(self.failed.values())
        applies = {
            "failed": bool(failures - {"upstream"}),
            "upstream": "upstream" in failures,
            "pending": any(self.pending.values()),
            "forgotten": self.forgotten,
            "unsaved": self.unsaved,
        }
        return [_CHECKS[name] for name, true in applies.items() if true]

    def body(self) -> dict[str, Any]:
        """As JSON values. ``signature``: HMAC-SHA256 of the rest as JSON with sorted keys and no spaces."""
        pending = self.pending
        body: dict[str, Any] = {
            "receipt": self.id,
            "tenant": self.tenant,
            "subject": dict(self.subject),
            "widened": self.widened,
            "epoch": self.epoch,
            "at": round(self.at, 3),
            "scopes": self.scopes,
            "complete": self.complete,
            "incomplete_because": self.reasons,
            "zeroed_blocks": sum(self.zeroed.values()),
            "pending_blocks": sum(pending.values()),
            "workers": {
                name: {"zeroed": blocks, "pending": pending.get(name, 0), "tiers": dict(self.tiers[name])}
                for name, blocks in self.zeroed.items()
            },
            "failed": dict(self.failed),
        }
        return {**body, "signature": _signature(body, self.secret)}

    def began(self, handle: WorkerHandle, answer: Purged) -> None:
        """A worker's first answer."""
        if answer.unreachable:
            self.failed[handle.name] = "upstream"
            return
        self._count(handle.name, answer, 1)
        self.in_use[handle.name] = answer.pending, handle

    def ended(self, handle: WorkerHandle, first: Purged | None, last: Purged) -> None:
        """A worker's last answer: what was in use is zeroed too, and every file unlinked."""
        if first is not None:
            self._count(handle.name, first, -1)
        self._count(handle.name, last, 1)
        self.in_use[handle.name] = 0, handle

    def _count(self, worker: str, answer: Purged, sign: int) -> None:
        known = self.tiers.setdefault(worker, {})
        for tier, blocks in {DEVICE: answer.blocks, **answer.tiers}.items():
            known[tier] = known.get(tier, 0) + sign * blocks


def valid(body: Mapping[str, Any], secret: bytes) -> bool:
    """Whether a receipt is this gateway's and unchanged."""
    rest = {name: value for name, value in body.items() if name != "signature"}
    given = body.get("signature")
    return isinstance(given, str) and hmac.compare_digest(given.encode(), _signature(rest, secret).encode())


def _signature(body: Mapping[str, Any], secret: bytes) -> str:
    signed = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hmac.new(secret, signed, hashlib.sha256).hexdigest()


class Purger:
    """Purges caches. One per gateway."""

    def __init__(self, tenants: Tenants, pools: Sequence[Pool], secret: bytes) -> None:
        """``secret`` signs receipts and keys labels."""
        self._tenants = tenants
        self._pools = pools
        self._secret = secret
        self._labels = Labels(secret)
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()

    def receipt(self, receipt_id: str) -> Receipt | None:
        """One of the last ``KEPT_RECEIPTS``, as it stands now."""
        return self._receipts.get(receipt_id)

    async def purge(self, subject: Subject | TenantId) -> Receipt:
        """Purge what ``subject`` names. Returns when every worker has answered or is given up (10 s)."""
        subject = subject if isinstance(subject, Subject) else Subject(subject)
        tenant = subject.tenant
        receipt = Receipt(
            secrets.token_hex(8),
            tenant,
            self._tenants.epoch(tenant),
            time.time(),
            0,
            subject=subject.as_json(),
            secret=self._secret,
        )
        self._keep(receipt)
        if not subject.whole:
            labels = self._labels.of_subject(subject)
            self._tenants.purged.note(labels, time.monotonic())
            await self.sweep(receipt, Purge(id="", labels=labels))
            if not receipt.failed:
                return receipt
            receipt.widened = True
        await self._whole(tenant, receipt)
        return receipt

    async def purge_keys(self, prefix: str, model: str, keys: list[bytes]) -> Receipt:
        """Zero the blocks of a public prefix that is public no more. No request can reach them already."""
        subject = {"public_prefix": [prefix]}
        receipt = Receipt(secrets.token_hex(8), "", 0, time.time(), 0, subject, secret=self._secret)
        self._keep(receipt)
        await self.sweep(receipt, Purge(id="", keys=keys), model)
        return receipt

    async def outdated(self, tenant: TenantId) -> Receipt:
        """Sweep the scopes of epochs that have ended; they are forgotten once every worker that can be asked has."""
        scopes = self._tenants.outdated(tenant)
        receipt = Receipt(secrets.token_hex(8), tenant, self._tenants.epoch(tenant), time.time(), len(scopes))
        if scopes:
            await self.sweep(receipt, Purge(id="", scopes=scopes))
            if set(receipt.failed.values()) <= {"upstream"}:
                self._tenants.swept(tenant, scopes)
        return receipt

    async def sweep(self, receipt: Receipt, what: Purge, model: str | None = None) -> None:
        """Ask every worker (of ``model``; None: of all) to zero ``what``, and note the answers."""
        pools = [pool for pool in self._pools if model in (None, pool.model)]
        receipt.failed |= {name: "not connected" for pool in pools for name in pool.out_of_reach}
        handles = [handle for pool in pools for handle in pool.connected]
        await asyncio.gather(*(self._ask(receipt, what, handle) for handle in handles))

    async def _ask(self, receipt: Receipt, what: Purge, handle: WorkerHandle) -> None:
        first: list[Purged] = []
        try:
            answer = await handle.purge(
                what, on_complete=lambda last: receipt.ended(handle, first[0] if first else None, last)
            )
        except (WorkerGoneError, TimeoutError) as error:
            receipt.failed[handle.name] = "timeout" if isinstance(error, TimeoutError) else "gone"
            return
        first.append(answer)
        receipt.began(handle, answer)

    async def _whole(self, tenant: TenantId, receipt: Receipt) -> None:
        receipt.epoch, scopes, known = self._tenants.bump(tenant)
        receipt.scopes = len(scopes)
        receipt.forgotten = not known
        try:
            await self._tenants.save_epochs()
        except OSError as error:
            _log.error("epoch_not_saved", tenant=tenant, failure=log.describe(error))
            receipt.unsaved = True
        if scopes:
            await self.sweep(receipt, Purge(id="", scopes=scopes))
            if not receipt.failed:
                self._tenants.swept(tenant, scopes)

    def _keep(self, receipt: Receipt) -> None:
        self._receipts[receipt.id] = receipt
        if len(self._receipts) > KEPT_RECEIPTS:
            self._receipts.popitem(last=False)


def sweep_behind(ticket: Ticket, tenant: EffectiveTenant, tenants: Tenants) -> None:
    """Zero what a finished request left under an epoch or label that was purged meanwhile; nobody waits for it."""
    if not ticket.ran_on:
        return
    ended = tenants.scope_epoch(tenant.id) != tenant.scope_epoch
    scopes = [ticket.job.cache_scope.key] if ended else []
    labels = tenants.purged.since(ticket.prepared.generate.labels, ticket.job.arrived_at)
    if scopes or labels:
        for handle in ticket.ran_on:
            try_send(handle, Purge(id=secrets.token_hex(8), scopes=scopes, labels=labels))
