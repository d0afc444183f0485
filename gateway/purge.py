"""Making a tenant's cached prefixes unreachable and zeroing them, with a receipt.

Rules
- The epoch is bumped first: from that moment no request can reach an old block, whatever becomes of the sweep.
- Every connected worker is asked, also one that drains, all at once, each in its own time. One that does not answer is
  named, and so is one that may run while nobody is connected to it: its blocks stay unreachable until it is gone.
- The sweep names scopes. Where more were used than are remembered (``scopes.py``), the receipt is not complete.
- A request that began under an older epoch and runs on after the sweep is swept up behind (``sweep_behind``).
- A receipt is signed with the server's secret, so that it can be shown to be this gateway's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.desk import try_send
from gateway.pool import Pool, WorkerGoneError, WorkerHandle
from gateway.tenants import EffectiveTenant, Tenants
from gateway.ticket import Ticket
from policies.types import TenantId
from workers.protocol import Purge


@dataclass(slots=True)
class Receipt:
    """What a purge did."""

    id: str
    tenant: str
    epoch: int
    """The new one: what was cached under older ones cannot be reached any more."""
    at: float
    scopes: int
    zeroed: dict[str, int] = field(default_factory=dict)
    """Blocks zeroed, by worker."""
    pending: dict[str, int] = field(default_factory=dict)
    """Blocks that running requests still use, by worker; zeroed when these end."""
    failed: dict[str, str] = field(default_factory=dict)
    """Workers that did not answer, and why."""
    forgotten: bool = False
    """More scopes were used than are remembered: blocks of the others were not swept."""
    secret: bytes = field(default=b"", repr=False)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to zero."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why it is not complete, in words."""
        checks = (
            (bool(self.failed), "a worker did not answer"),
            (any(self.pending.values()), "running requests still use some blocks; they are zeroed when these end"),
            (
                self.forgotten,
                "more cache scopes were used than are remembered; what is cached under the others is unreachable, but "
                "not zeroed before it is reused. Restart the workers to be sure",
            ),
        )
        return [reason for applies, reason in checks if applies]

    def body(self) -> dict[str, Any]:
        """As JSON values. ``signature``: HMAC-SHA256 of the rest as JSON with sorted keys and no spaces."""
        body: dict[str, Any] = {
            "receipt": self.id,
            "tenant": self.tenant,
            "epoch": self.epoch,
            "at": round(self.at, 3),
            "scopes": self.scopes,
            "complete": self.complete,
            "incomplete_because": self.reasons,
            "zeroed_blocks": sum(self.zeroed.values()),
            "pending_blocks": sum(self.pending.values()),
            "workers": {
                name: {"zeroed": blocks, "pending": self.pending.get(name, 0)} for name, blocks in self.zeroed.items()
            },
            "failed": dict(self.failed),
        }
        signed = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        return {**body, "signature": hmac.new(self.secret, signed, hashlib.sha256).hexdigest()}


async def purge(tenant: TenantId, tenants: Tenants, pools: Sequence[Pool], secret: bytes) -> Receipt:
    """Bump the tenant's epoch and sweep its blocks."""
    epoch, scopes, known = tenants.bump(tenant)
    receipt = Receipt(secrets.token_hex(8), tenant, epoch, time.time(), len(scopes), forgotten=not known, secret=secret)

    async def sweep(handle: WorkerHandle) -> None:
        try:
            answer = await handle.purge(scopes)
        except (WorkerGoneError, TimeoutError) as error:
            receipt.failed[handle.name] = "timeout" if isinstance(error, TimeoutError) else "gone"
            return
        if answer.unreachable:
            receipt.failed[handle.name] = "upstream"
            return
        receipt.zeroed[handle.name] = answer.blocks
        receipt.pending[handle.name] = answer.pending

    if scopes:
        receipt.failed = {name: "not connected" for pool in pools for name in pool.out_of_reach}
        await asyncio.gather(*(sweep(handle) for pool in pools for handle in pool.connected))
    return receipt


def sweep_behind(ticket: Ticket, tenant: EffectiveTenant, tenants: Tenants) -> None:
    """Zero what a finished request left under an epoch that has ended meanwhile; nobody waits for it."""
    if ticket.ran_on and tenants.epoch(tenant.id) != tenant.epoch:
        scope = ticket.job.cache_scope.key
        for handle in ticket.ran_on:
            try_send(handle, Purge(id=secrets.token_hex(8), scopes=[scope]))
