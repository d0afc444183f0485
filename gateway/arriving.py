"""Bodies that are on their way: whose are read, and how much of one tenant may be at once.

A body is read before its request can be counted anywhere: nobody knows yet what it asks. So a caller could open a
thousand connections, send each body but for its last byte, and fill the memory of all.

Rules
- What counts is what has arrived of bodies that are not whole yet. One that came with its headers never counts.
- Of a caller that was refused too often none is read (``refusals.py``).
- A tenant that is over ``most`` gets 429 for the body that takes it there; the others go on.
- Belongs to the event loop. What a body counted is given back once, however its reading ends.
"""

from __future__ import annotations

from collections import Counter

from starlette.types import Message, Receive

from gateway.errors import throttled
from gateway.http.middleware import read_body
from gateway.refusals import Refusals
from policies.types import Principal, TenantId

MOST = 64 * 2**20
BODIES = 4
"""So many of the largest size always have room."""


class Arriving:
    """Reads bodies. One per gateway."""

    def __init__(self, max_body_bytes: int, refusals: Refusals) -> None:
        self._limit = max_body_bytes
        self._refusals = refusals
        self.most = max(MOST, BODIES * max_body_bytes)
        """Bytes per tenant. May be changed at any time."""
        self._held: Counter[TenantId] = Counter()

    def __len__(self) -> int:
        """Bytes of all tenants."""
        return sum(self._held.values())

    async def body(self, principal: Principal, receive: Receive) -> bytes:
        """The whole body. Raises ApiError 413, 429; ClientDisconnect when the caller goes away."""
        self._refusals.check(principal)
        tenant, held = principal.tenant, 0

        async def counted() -> Message:
            nonlocal held
            message = await receive()
            if message.get("more_body", False):
                size = len(message.get("body", b""))
                held += size
                self._held[tenant] += size
                if self._held[tenant] > self.most:
                    raise throttled(
                        f"More than {self.most} bytes of your tenant's request bodies are on their way at once. "
                        "Send fewer at a time.",
                        "bodies_on_their_way",
                        1.0,
                    )
            return message

        try:
            return await read_body(counted, self._limit)
        finally:
            if held:
                self._held[tenant] -= held
                if not self._held[tenant]:
                    del self._held[tenant]
