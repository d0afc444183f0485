"""How long a tenant's cached prefixes live at most, however often they are hit (``privacy.cache_retention_s``).

Rules
- Time is cut into windows of the retention time, per tenant from an offset of its own. The window is part of the cache
  scope, so what was cached in one cannot be hit in the next: nothing that can be hit is older than the retention time.
- At the end of a window its scopes are swept: zeroed within about a second, blocks in use when they are released.
- Windows follow from the clock alone: they need no memory, and are the same after a restart and in every replica.
- Scopes of epochs that a purge ended while a worker could not be reached are swept in the same way when it is back.
"""

from __future__ import annotations

import asyncio

from gateway import log
from gateway.purge import Purger
from gateway.tenants import Tenants

_log = log.get("retention")

TICK_S = 1.0
RETRY_S = 5.0
"""Scopes that a worker was not asked about are tried again so much later."""
_YIELD_EVERY = 512


async def sweep_outdated(tenants: Tenants, purger: Purger) -> None:
    """Look once a second for scopes whose epoch or window has ended, and sweep them. Runs until cancelled."""
    later: dict[str, float] = {}
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(TICK_S)
        for number, tenant in enumerate(tenants.with_scopes()):
            if number % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
            if clock() < later.get(tenant, 0.0) or not tenants.outdated(tenant):
                continue
            receipt = await purger.outdated(tenant)
            later.pop(tenant, None)
            if set(receipt.failed.values()) - {"upstream"}:
                later[tenant] = clock() + RETRY_S
            else:
                _log.info("outdated_cache_swept", tenant=tenant, blocks=sum(receipt.zeroed.values()))
