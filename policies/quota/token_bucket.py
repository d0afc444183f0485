"""``token_bucket``: requests per minute, tokens per minute and concurrent requests of each tenant, in memory.

Rules
- ``reserve`` asks every limit first and takes only when all agree: a refusal has taken nothing anywhere.
- A reservation takes one request, prompt + max output tokens and one slot. ``settle`` replaces it by what ran (prompt
  computed and cached, output) and frees the slot; where nothing ran at all the request is given back too.
- More ran than was reserved: the difference is taken as well and the bucket may go into debt, which time repays before
  the next request is admitted. Tokens are never forgiven, and a running request is never cut for it.
- A reservation that is not settled within ``lease_s`` frees its slot and keeps its tokens; a late settlement still
  corrects them, until it is forgotten after ``_FORGET_LEASES`` leases.
- A tenant's limits come with each job. A change is adopted without refilling.
- Tenants without reservations and with full buckets are forgotten, a few at each call: no state outlives its use.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import Field

from policies.quota._bucket import WINDOW_S, Bucket
from policies.spi import Json, PolicyConfig, PolicyContext, PolicySpec
from policies.types import Job, JobId, LimitState, QuotaDecision, TenantId, Usage

_CONCURRENT_RETRY_S = 1.0
"""Nobody knows when a running request ends; ask again soon."""
_FORGET_LEASES = 4
_SWEEP = 2
"""Idle tenants looked at per call; more than one, so that the number of tenants kept shrinks."""


@dataclass(frozen=True, slots=True)
class _Meter:
    """A limit that is a bucket: where to read the tenant's limit, its header name, what a job costs."""

    limit: str
    header: str
    cost: Callable[[Job], int]
    of: Callable[[Job], int | None]


_METERS = (
    _Meter("requests_per_minute", "requests", lambda job: 1, lambda job: job.limits.requests_per_minute),
    _Meter("tokens_per_minute", "tokens", lambda job: job.total_tokens, lambda job: job.limits.tokens_per_minute),
)


@dataclass(slots=True)
class _Reservation:
    tenant: TenantId
    tokens: int
    taken: dict[str, int]
    """Units taken per bucket (header name); a limit that was not set then is not corrected later."""
    expires_at: float
    holds_slot: bool = True


@dataclass(slots=True)
class _Account:
    """A tenant's buckets by header name, and its taken slots."""

    buckets: dict[str, Bucket] = field(default_factory=dict)
    slots: int = 0
    reservations: int = 0
    checked_at: float = 0.0


class TokenBucketConfig(PolicyConfig):
    """Limits themselves belong to the tenants."""

    lease_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """Longest time a reservation holds its slot without being settled; above ``timeouts.total_s``."""


class TokenBucketQuota:
    """See the module's rules. Every call is O(log open reservations) and runs in one event-loop turn."""

    def __init__(self, lease_s: float = 900.0) -> None:
        self._lease_s = lease_s
        self._accounts: OrderedDict[TenantId, _Account] = OrderedDict()  # longest not checked first
        self._open: dict[JobId, _Reservation] = {}
        self._leases: list[tuple[float, JobId]] = []

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        """Take one request, its tokens and a slot, or nothing."""
        self._expire(now)
        self._sweep(now)
        account = self._account(job, now)
        if job.id in self._open:
            return QuotaDecision(True, cost=self._open[job.id].tokens, remaining=_remaining(account))
        refusal = _never(job, account) or _refusal(job, account)
        if refusal is not None:
            return refusal
        taken = {meter.header: meter.cost(job) for meter in _METERS if meter.header in account.buckets}
        for header, units in taken.items():
            account.buckets[header].take(units)
        self._open[job.id] = _Reservation(job.tenant, job.total_tokens, taken, now + self._lease_s)
        account.slots += 1
        account.reservations += 1
        heapq.heappush(self._leases, (now + self._lease_s, job.id))
        return QuotaDecision(True, cost=job.total_tokens, remaining=_remaining(account))

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """Replace the reservation by what ran. ``refunded`` is negative when more ran than was reserved."""
        self._expire(now)
        self._sweep(now)
        reservation = self._open.pop(job_id, None)
        if reservation is None:
            return {"refunded": 0}
        account = self._accounts[reservation.tenant]
        self._close(account, reservation)
        refunded = reservation.tokens - usage.total
        ran = {"tokens": usage.total, "requests": 1 if usage.total else 0}
        for header, units in reservation.taken.items():
            self._give(account, header, units - ran[header], now)
        return {"refunded": refunded, "remaining": _remaining(account)}

    def dump(self) -> Json:
        """Buckets per tenant and open reservations."""
        return {
            "buckets": {
                str(tenant): {name: asdict(bucket) for name, bucket in account.buckets.items()}
                for tenant, account in self._accounts.items()
            },
            "reservations": {str(job_id): asdict(reservation) for job_id, reservation in self._open.items()},
        }

    def load(self, state: Json) -> None:
        """Replace buckets and reservations. Raises ValueError when they do not have their shape."""
        try:
            buckets = {
                TenantId(tenant): {name: Bucket(**bucket) for name, bucket in by_name.items()}
                for tenant, by_name in state.get("buckets", {}).items()
            }
            opened = {JobId(job_id): _Reservation(**item) for job_id, item in state.get("reservations", {}).items()}
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not the dump of a quota policy: {error}") from error
        self._open = opened
        self._accounts = OrderedDict((tenant, _Account(by_name)) for tenant, by_name in buckets.items())
        for reservation in opened.values():
            account = self._accounts.setdefault(reservation.tenant, _Account())
            account.reservations += 1
            account.slots += reservation.holds_slot
        self._leases = [(reservation.expires_at, job_id) for job_id, reservation in opened.items()]
        heapq.heapify(self._leases)

    def remaining(self, tenant: TenantId, now: float) -> Mapping[str, LimitState]:
        """What the tenant has left, for admin views: the very figures that decide. Empty when nothing is kept."""
        account = self._accounts.get(tenant)
        if account is None:
            return {}
        for bucket in account.buckets.values():
            bucket.refill(now)
        return _remaining(account)

    def concurrent(self, tenant: TenantId) -> int:
        """Slots taken."""
        account = self._accounts.get(tenant)
        return account.slots if account else 0

    def __len__(self) -> int:
        """Tenants kept in memory."""
        return len(self._accounts)

    def _account(self, job: Job, now: float) -> _Account:
        account = self._accounts.get(job.tenant)
        if account is None:
            account = self._accounts[job.tenant] = _Account(checked_at=now)
        for meter in _METERS:
            limit = meter.of(job)
            bucket = account.buckets.get(meter.header)
            if limit is None or limit <= 0:  # 0 forbids everything: _never sees to it without a bucket
                account.buckets.pop(meter.header, None)
            elif bucket is None:
                account.buckets[meter.header] = Bucket.full(limit, now)
            else:
                bucket.adopt(limit, now)
        return account

    @staticmethod
    def _give(account: _Account, name: str, units: int, now: float) -> None:
        bucket = account.buckets.get(name)
        if bucket is not None:
            bucket.refill(now)
            bucket.take(-units)

    @staticmethod
    def _close(account: _Account, reservation: _Reservation) -> None:
        account.reservations -= 1
        account.slots -= reservation.holds_slot
        reservation.holds_slot = False

    def _expire(self, now: float) -> None:
        while self._leases and self._leases[0][0] <= now:
            _, job_id = heapq.heappop(self._leases)
            reservation = self._open.get(job_id)
            if reservation is None or reservation.expires_at > now:
                continue
            account = self._accounts[reservation.tenant]
            if reservation.holds_slot:
                account.slots -= 1
                reservation.holds_slot = False
                reservation.expires_at += self._lease_s * (_FORGET_LEASES - 1)
                heapq.heappush(self._leases, (reservation.expires_at, job_id))
            else:
                del self._open[job_id]
                self._close(account, reservation)

    def _sweep(self, now: float) -> None:
        for _ in range(_SWEEP):
            tenant, account = next(iter(self._accounts.items()), (None, None))
            if tenant is None or account is None or now - account.checked_at < WINDOW_S:
                return
            if not account.reservations and all(bucket.is_full(now) for bucket in account.buckets.values()):
                del self._accounts[tenant]
            else:
                account.checked_at = now
                self._accounts.move_to_end(tenant)


def _never(job: Job, account: _Account) -> QuotaDecision | None:
    """The refusal of a job that not even a full quota would admit."""
    for meter in _METERS:
        limit, cost = meter.of(job), meter.cost(job)
        if limit is not None and cost > limit:
            message = (
                f"It asks for up to {cost} {meter.header} at once, but {meter.limit} is {limit}"
                if cost > 1
                else f"{meter.limit} is {limit}"
            )
            if meter.header == "tokens" and job.prompt_tokens < limit:
                message += f"; with its {job.prompt_tokens} prompt tokens, max_tokens can be at most " + str(
                    limit - job.prompt_tokens
                )
            return QuotaDecision(
                False, meter.limit, cost, never=True, remaining=_remaining(account), message=message + "."
            )
    if job.limits.concurrent is not None and job.limits.concurrent <= 0:
        return QuotaDecision(False, "concurrent", 1, never=True, message="concurrent is 0.")
    return None


def _refusal(job: Job, account: _Account) -> QuotaDecision | None:
    """The refusal for now, naming the limit that takes longest, or None when every limit agrees."""
    waits: list[tuple[float, str, int]] = []
    for meter in _METERS:
        bucket = account.buckets.get(meter.header)
        if bucket is not None:
            waits.append((bucket.wait(meter.cost(job)), meter.limit, meter.cost(job)))
    if job.limits.concurrent is not None and account.slots >= job.limits.concurrent:
        waits.append((_CONCURRENT_RETRY_S, "concurrent", 1))
    wait, limit, cost = max(waits, default=(0.0, "", 0))
    if wait <= 0:
        return None
    return QuotaDecision(False, limit, cost, retry_after_s=wait, remaining=_remaining(account))


def _remaining(account: _Account) -> dict[str, LimitState]:
    return {name: bucket.state() for name, bucket in account.buckets.items()}


def _make(config: TokenBucketConfig, ctx: PolicyContext) -> TokenBucketQuota:
    return TokenBucketQuota(config.lease_s)


SPEC = PolicySpec(
    "quota", "token_bucket", TokenBucketConfig, _make, "Requests/min, tokens/min and concurrency per tenant, in memory."
)
