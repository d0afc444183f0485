"""Giving back what a request holds, exactly once, whatever became of it.

Rules
- At once where nothing has to be waited for: its work has ended, and the quota policy keeps all in memory
  (``policies.spi.NeverWaits``). Else by one task, which nobody's cancellation reaches.
- Before an answer's last byte; but what is done at once follows right behind it, also where nobody takes that byte, and
  before anything is looked at that its reader says then (``soon``).
- The ticket ends first, so that usage is what really ran; a worker is given a moment for its last word.
- Nothing here raises: a policy that fails is logged and counted, and the lease frees what it held.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import cast

from gateway import log
from gateway import trace_attributes as attributes
from gateway.dispatch import Dispatcher
from gateway.monitor import Monitor
from gateway.runtime import Runtime
from gateway.settings import Timeouts
from gateway.visit import Visit
from gateway.within import at_once, within
from policies.spi import QuotaPolicy
from policies.types import Usage

_log = log.get("pipeline")

CANCEL_GRACE_S = 0.25
"""How long it waits for the worker's last word on a request that was cut short."""


class Settler:
    """Settles requests. One per gateway; state of a request is in its ``Visit``."""

    def __init__(
        self,
        runtime: Runtime,
        dispatchers: Mapping[str, Dispatcher],
        monitor: Monitor,
        timeouts: Timeouts,
        clock: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._dispatchers = dispatchers
        self._monitor = monitor
        self._clock = clock
        self._settling: set[asyncio.Task[None]] = set()
        self.timeouts = timeouts
        """May be changed at any time."""

    async def wait(self) -> None:
        """Return when no settlement is on its way."""
        while self._settling:
            await asyncio.wait(set(self._settling))

    async def settle(self, visit: Visit) -> None:
        """Give back what is held. Cancelling the caller does not cancel it."""
        if (settlement := self.begin(visit)) is not None:
            await asyncio.shield(settlement)

    def soon(self, visit: Visit) -> asyncio.Task[None] | None:
        """What has to be waited for before the last byte, if anything. What is done at once is done in the loop's next
        turn at the latest: what the byte's reader says then comes behind it.
        """
        if visit.settled or visit.settlement is not None or self._waits(visit):
            return self.begin(visit)
        asyncio.get_running_loop().call_soon(self.begin, visit)
        return None

    def begin(self, visit: Visit) -> asyncio.Task[None] | None:
        """The settlement, which is begun once; None once it is over."""
        if visit.settlement is None and not visit.settled:
            if self._waits(visit):
                visit.settlement = asyncio.create_task(self._settlement(visit), name="settle")
                self._settling.add(visit.settlement)
                visit.settlement.add_done_callback(self._settling.discard)
            else:
                self._at_once(visit)
                visit.settled = True
        return None if visit.settled else visit.settlement

    def _waits(self, visit: Visit) -> bool:
        """Whether something has to be waited for: the end of its work, or a quota policy that does not keep all in
        memory.
        """
        if visit.ticket is not None and not visit.ticket.done:
            return True
        return visit.reserved and not self._never_waits(visit.policies.quota)

    def _at_once(self, visit: Visit) -> None:
        """Settle without waiting for anything."""
        try:
            at_once(self._given_back(visit))
        except RuntimeError as error:
            self._unsettled(visit, error)

    async def _settlement(self, visit: Visit) -> None:
        """End the ticket, then the reservation. Never raises: a failure is logged and counted, the lease runs out."""
        ticket, prepared = visit.ticket, visit.prepared
        if ticket is not None and prepared is not None and not ticket.done:
            dispatcher = self._dispatchers[prepared.job.model]
            dispatcher.cancel(ticket, visit.reason or "ended_early")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_GRACE_S):
                    await ticket.wait_done()
            dispatcher.abandon(ticket, visit.reason or "ended_early")
        await self._given_back(visit)

    async def _given_back(self, visit: Visit) -> None:
        """The reservation, for what ran. Never raises."""
        job = visit.prepared.job if visit.prepared is not None else visit.errand
        if job is None or not visit.reserved:
            return
        usage = visit.ticket.usage if visit.ticket is not None else Usage()
        with visit.span("quota settle") as span:
            try:
                settling = self._runtime.settle(visit.policies.quota, job.id, usage, self._clock())
                figures = await within(self.timeouts.policy_s, settling)
                span.set(attributes.settled, usage, cast("int | None", figures.get("refunded")))
            except Exception as error:
                span.fail("settle_failed")
                self._unsettled(visit, error)

    def _unsettled(self, visit: Visit, error: Exception) -> None:
        """The quota policy failed: the lease runs out."""
        self._monitor.fault("settle")
        _log.error("settle_failed", request_id=visit.request_id, failure=log.describe(error))

    def _never_waits(self, quota: QuotaPolicy) -> bool:
        """Whether settling is done at once, with the policy that a request began with and with the live one."""
        live = self._runtime.current.quota
        return _in_memory(quota) and (live is quota or _in_memory(live))


def _in_memory(quota: QuotaPolicy) -> bool:
    """Whether it says so (``policies.spi.NeverWaits``)."""
    return getattr(quota, "never_waits", False) is True
