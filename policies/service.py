"""Who was served how much, and how fast: the queue's book of work that ran. Pure; the caller passes ``now``.

Rules
- Figures are tokens of all kinds (prompt computed, prompt cached, output), unweighted; policies count on their own.
- The rate is measured over time in which jobs were waiting while others ran: only then do the workers show what they
  can do. It is kept through quiet hours, so that a burst after an idle night is not judged by the night.
- What a job used is set against what it might have used: most answers end before ``max_tokens``.
- Memory is bounded: at most ``MAX_TENANTS`` tenants (the longest unserved are forgotten) with ``MAX_MARKS`` marks each.
- Time is bounded: who was served most since a moment is looked for among the ``MAX_LOOKED_AT`` tenants served last and
  the ``HEAVY`` that were served most lately. With more tenants than that the answer may miss one that was served much,
  but neither last nor much of late; each figure that it names is exact.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter

from policies.types import TenantId

RATE_WINDOW_S = 10.0
"""Time constant of the service rate, in seconds of backlogged time."""
SHARE_WINDOW_S = 30.0
"""Time constant of the recent service behind ``shares`` and ``virtual_lag``."""
MIN_MEASURED_S = 1.0
"""Backlogged time after which the rate counts as measured."""
USED_JOBS = 64
"""Jobs over which the used part of reservations is averaged."""
MIN_USED_JOBS = 8
"""Jobs that have to end before there is such a part."""
MAX_TENANTS = 4096
MAX_MARKS = 256
MAX_LOOKED_AT = 48
HEAVY = 16


@dataclass(slots=True)
class _Account:
    total: int = 0
    weight: float = 1.0
    recent: float = 0.0
    recent_at: float = 0.0
    # marks[i] = tokens served before epoch epochs[i]; strictly rising epochs.
    epochs: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def decayed(self, now: float) -> float:
        return self.recent * math.exp(-max(0.0, now - self.recent_at) / SHARE_WINDOW_S)


class ServiceBook:
    """Totals per tenant, what was served since a moment, shares and the service rate.

    A moment is an epoch number: ``mark()`` gives one to a job that starts waiting, ``since(epoch)`` answers who was
    served meanwhile. Epochs advance only when something was served in between, so that many offers share one.
    """

    def __init__(self) -> None:
        self._accounts: OrderedDict[TenantId, _Account] = OrderedDict()  # longest unserved first
        self._heavy: list[TenantId] = []
        self._until_heavy = 0
        self._epoch = 0
        self._dirty = False
        self._tokens = 0.0
        self._seconds = 0.0
        self._clock: float | None = None
        self._ended = 0
        self._reserved = 0.0
        self._used = 0.0

    def mark(self) -> int:
        """The current moment. O(1)."""
        if self._dirty:
            self._epoch += 1
            self._dirty = False
        return self._epoch

    def advance(self, now: float, backlogged: bool) -> None:
        """Tell the time and whether jobs waited since the last call. O(1)."""
        if self._clock is not None and backlogged and now > self._clock:
            passed = now - self._clock
            decay = math.exp(-passed / RATE_WINDOW_S)
            self._tokens *= decay
            self._seconds = self._seconds * decay + passed
        if self._clock is None or now > self._clock:
            self._clock = now

    def serve(self, tenant: TenantId, weight: float, tokens: int, now: float, backlogged: bool) -> None:
        """Book work that ran. O(1)."""
        if tokens <= 0:
            return
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
            if len(self._accounts) > MAX_TENANTS:
                self._accounts.popitem(last=False)
        account.weight = weight
        if not account.epochs or account.epochs[-1] != self._epoch:
            self._accounts.move_to_end(tenant)
            account.epochs.append(self._epoch)
            account.marks.append(account.total)
            if len(account.epochs) > MAX_MARKS:
                # Thin out the older half: answers for long waits get coarser, recent ones stay exact.
                half = MAX_MARKS // 2
                account.epochs[:half] = account.epochs[1:half:2]
                account.marks[:half] = account.marks[1:half:2]
        account.total += tokens
        if account.recent_at != now:
            account.recent = account.decayed(now)
            account.recent_at = now
        account.recent += tokens
        self._dirty = True
        self._until_heavy -= 1
        if self._until_heavy < 0:
            self._find_heavy(now)
        if backlogged:
            self._tokens += tokens

    def ended(self, reserved: int, used: int) -> None:
        """A job is over that might have taken ``reserved`` tokens. O(1)."""
        keep = 1 - 1 / USED_JOBS
        self._ended += 1
        self._reserved = keep * self._reserved + reserved
        self._used = keep * self._used + used

    def since(self, epoch: int, most: int) -> tuple[tuple[TenantId, int], ...]:
        """The ``most`` tenants served most tokens since ``epoch``, largest first; see the module's rules. O(1)."""
        accounts = self._accounts
        served: dict[TenantId, int] = {}
        for tenant in chain(islice(reversed(accounts), MAX_LOOKED_AT), self._heavy):
            account = accounts.get(tenant)
            if account is not None and account.epochs[-1] >= epoch:
                served[tenant] = account.total - account.marks[bisect_left(account.epochs, epoch)]
        return tuple(sorted(served.items(), key=itemgetter(1), reverse=True)[:most])

    def _find_heavy(self, now: float) -> None:
        """Once per as many servings as there are tenants: O(1) amortised."""
        accounts = self._accounts
        self._heavy = heapq.nlargest(HEAVY, accounts, key=lambda tenant: accounts[tenant].decayed(now))
        self._until_heavy = max(4 * HEAVY, len(accounts))

    def totals(self) -> Mapping[TenantId, int]:
        """Tokens served per tenant since the book was opened (or since the tenant was last forgotten)."""
        return {tenant: account.total for tenant, account in self._accounts.items()}

    def shares(self, now: float) -> Mapping[TenantId, float]:
        """Each tenant's part of the tokens served lately; parts add up to 1 where anything was served."""
        recent = {tenant: account.decayed(now) for tenant, account in self._accounts.items()}
        whole = sum(recent.values())
        return {tenant: tokens / whole for tenant, tokens in recent.items()} if whole > 0 else {}

    def virtual_lag(self, tenants: Iterable[TenantId], now: float) -> Mapping[TenantId, float]:
        """How far each of ``tenants`` (the backlogged ones) lags in recent tokens per unit of weight.

        Measured from the best-served of them, so 0 is ahead and larger is further behind.
        """
        level: dict[TenantId, float] = {}
        for tenant in tenants:
            account = self._accounts.get(tenant)
            level[tenant] = account.decayed(now) / account.weight if account else 0.0
        top = max(level.values(), default=0.0)
        return {tenant: top - value for tenant, value in level.items()}

    @property
    def used_ratio(self) -> float | None:
        """Part of their most tokens that jobs really took, of late; None before a few have ended."""
        return min(1.0, self._used / self._reserved) if self._ended >= MIN_USED_JOBS and self._reserved else None

    @property
    def rate(self) -> float | None:
        """Tokens per second lately delivered while jobs were waiting; None before there is a measurement."""
        return self._tokens / self._seconds if self._seconds >= MIN_MEASURED_S and self._tokens > 0 else None
