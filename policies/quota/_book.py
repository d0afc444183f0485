"""The books behind ``token_bucket`` and ``ledger``: accounts and open reservations. Pure: no clock, no I/O.

Rules
- A reservation asks every limit of every account first and takes only when all agree: a refusal has taken nothing.
- It takes the most that the job can cost. ``settle`` replaces that by what ran and frees what was held; where nothing
  ran at all, the request is given back too; but a job that takes no tokens (tokenising) costs its request. More ran
  than was reserved: the rest is taken as well, into debt, which time repays before the next request is admitted. A
  running request is never cut for it.
- A lease that runs out frees what was held and gives budgets back, since nobody knows what ran; rates keep what was
  taken. A late settlement still corrects both, until the reservation is forgotten ``_FORGET_LEASES`` leases later.
- Limits come with each job. A change is adopted without refilling; a rate that was not limited when a job reserved is
  not corrected by it.
- Accounts without reservations, debt or spending are forgotten, a few at each call: no state outlives its use.
- Every reservation leaves once: settled, undone or forgotten.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from policies.quota._account import Account, AccountKey, Instant, Objection, tighten
from policies.quota._bucket import Bucket
from policies.quota.limits import accounts_of, money, most_output, ran, reserved
from policies.spi import Json
from policies.types import (
    Job,
    JobId,
    LimitState,
    LimitStatus,
    QuotaAccount,
    QuotaDecision,
    TenantId,
    TokenPrice,
    Usage,
)

_FORGET_LEASES = 4
_SWEEP = 2
"""Idle accounts looked at per call; more than one, so that the number of accounts kept shrinks."""
_SWEEP_AFTER_S = 60.0
BUDGETED = frozenset({"organisation", "tenant", "user"})
"""Levels that may have a budget. Of keys, of which there is one for each token, no spending has to be remembered."""
_WITHOUT_OUTPUT = frozenset({"requests", "input_tokens", "concurrent", "queued"})
"""Units that less output would not lessen."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Whose job it is: what a row of the ledger says. No content."""

    id: JobId
    organisation: str | None
    tenant: TenantId
    user: str | None
    key: str | None
    model: str
    service_class: str
    cost_centre: str | None
    prompt_tokens: int
    max_tokens: int
    price: TokenPrice | None = None

    @classmethod
    def of(cls, job: Job) -> Entry:
        """The facts of a job."""
        return cls(
            job.id,
            job.organisation,
            job.tenant,
            job.user,
            job.key_id,
            job.served,
            job.service_class,
            job.cost_centre,
            job.prompt_tokens,
            job.max_tokens,
            job.price,
        )


@dataclass(slots=True)
class Reservation:
    """What one job holds."""

    entry: Entry
    taken: dict[str, int]
    """By unit."""
    rates: dict[AccountKey, tuple[str, ...]]
    """From which rates of which accounts it was taken."""
    month: int
    expires_at: float
    holds: bool = True
    waits: bool = True
    """It counts as queued."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a reservation ended."""

    reservation: Reservation
    late: bool
    """Its lease had run out before."""
    tokens: int
    """Given back; negative when more ran than was reserved."""
    cost: int
    """Billionths of the currency."""
    remaining: dict[str, LimitState] = field(default_factory=dict)


class Book:
    """See the module's rules. Every call is O(accounts of the job + log open reservations)."""

    def __init__(self, lease_s: float, *, keep_spent: bool = False) -> None:
        """``keep_spent``: remember the month's spending of accounts without a budget too."""
        self.lease_s = lease_s
        self._keep_spent = keep_spent
        self._accounts: OrderedDict[AccountKey, Account] = OrderedDict()  # longest not checked first
        self._open: dict[JobId, Reservation] = {}
        self._leases: list[tuple[float, JobId]] = []

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._open

    def reserve(self, job: Job, at: Instant) -> tuple[QuotaDecision, Reservation | None]:
        """Take what ``job`` may cost, or nothing. No reservation comes with a refusal, or with a job that has one."""
        self._sweep(at)
        wanted = accounts_of(job)
        accounts = [self._account(account, at) for account in wanted]
        known = self._open.get(job.id)
        if known is not None:
            return QuotaDecision(True, cost=known.taken["tokens"], remaining=_tightest(accounts, at)), None
        cost = reserved(job)
        objections = [objection for account in accounts for objection in account.objections(cost, at)]
        if objections:
            worst = max(objections, key=_gravity)
            return _refusal(worst, job, wanted, _tightest(accounts, at)), None
        rates = {account.key: account.take(cost) for account in accounts}
        month = max([account.month for account in accounts])
        reservation = Reservation(Entry.of(job), cost, rates, month, at.now + self.lease_s)
        self._open[job.id] = reservation
        heapq.heappush(self._leases, (reservation.expires_at, job.id))
        return QuotaDecision(True, cost=job.total_tokens, remaining=_tightest(accounts, at)), reservation

    def settle(self, job_id: JobId, usage: Usage, at: Instant) -> Settlement | None:
        """Replace the reservation by what ran. None for an id that is unknown or settled."""
        reservation = self._open.pop(job_id, None)
        if reservation is None:
            return None
        late = not reservation.holds
        actual = ran(usage, reservation.entry.price)
        if not reservation.taken["tokens"]:
            actual["requests"] = 1
        rest = {unit: amount - actual[unit] for unit, amount in reservation.taken.items()}
        accounts = self._leave(reservation, at)
        for account, rates in zip(accounts, reservation.rates.values(), strict=True):
            account.give(rates, rest, at.now)
            account.spend(actual if late else rest, reservation.month, 1 if late else -1)
        return Settlement(reservation, late, rest["tokens"], actual["currency"], _tightest(accounts, at))

    def undo(self, job_id: JobId, at: Instant) -> None:
        """As if it had never been reserved. Nothing for an id that is unknown or settled."""
        reservation = self._open.pop(job_id, None)
        if reservation is not None:
            accounts = self._leave(reservation, at)
            for account, rates in zip(accounts, reservation.rates.values(), strict=True):
                account.give(rates, reservation.taken, at.now)
                account.spend(reservation.taken, reservation.month, -1)

    def started(self, job_id: JobId) -> None:
        """It left the queue for a worker."""
        reservation = self._open.get(job_id)
        if reservation is not None and reservation.waits and reservation.holds:
            reservation.waits = False
            for key in reservation.rates:
                self._accounts[key].free("queued", 1)

    def hasten(self, job_id: JobId, now: float) -> None:
        """Its lease is over: for ``expire``. Nothing for an id that is unknown, settled or holds nothing."""
        reservation = self._open.get(job_id)
        if reservation is not None and reservation.holds:
            reservation.expires_at = now
            heapq.heappush(self._leases, (now, job_id))

    def expire(self, now: float) -> list[Reservation]:
        """End the leases that are over; those that ended now."""
        ended: list[Reservation] = []
        while self._leases and self._leases[0][0] <= now:
            _, job_id = heapq.heappop(self._leases)
            reservation = self._open.get(job_id)
            if reservation is None or reservation.expires_at > now:
                continue
            if reservation.holds:
                for key in reservation.rates:
                    self._accounts[key].spend(reservation.taken, reservation.month, -1)
                self._free(reservation)
                reservation.expires_at += self.lease_s * (_FORGET_LEASES - 1)
                heapq.heappush(self._leases, (reservation.expires_at, job_id))
                ended.append(reservation)
            else:
                del self._open[job_id]
                for key in reservation.rates:
                    self._accounts[key].reservations -= 1
        return ended

    def account(self, wanted: QuotaAccount, at: Instant) -> Account:
        """It, brought up to date; a full one where nothing is kept of it (which is not kept either)."""
        found = self._accounts.get(_key(wanted)) or Account(_key(wanted), month=at.month)
        found.adopt(wanted.limits, at)
        return found

    def remaining(self, tenant: TenantId, at: Instant) -> dict[str, LimitState]:
        """What the tenant itself has left: the very figures that decide. Empty when nothing is kept."""
        account = self._accounts.get(("tenant", tenant, tenant))
        if account is None:
            return {}
        account.refresh(at)
        return account.headers(at)

    def status(self, accounts: tuple[QuotaAccount, ...], at: Instant) -> list[LimitStatus]:
        """Every limit of these accounts, with what is left."""
        return [status for wanted in accounts for status in self.account(wanted, at).status(at)]

    def tightest(self, accounts: tuple[QuotaAccount, ...], at: Instant) -> dict[str, LimitState]:
        """As ``QuotaDecision.remaining``, without a reservation."""
        return _tightest([self.account(wanted, at) for wanted in accounts], at)

    def held(self, key: AccountKey, holding: str) -> int:
        """How much of a holding an account has."""
        account = self._accounts.get(key)
        return account.held[holding] if account else 0

    def touched(self, reservation: Reservation) -> Iterator[Account]:
        """The accounts of a reservation, as they are now."""
        return (self._accounts[key] for key in reservation.rates if key in self._accounts)

    def restore(self, account: Account) -> None:
        """Put an account in, as it was when the books were last closed."""
        self._accounts[account.key] = account

    def open(self) -> list[Reservation]:
        """Everything that is not settled."""
        return list(self._open.values())

    def absorb(self, state: Json) -> None:
        """Take over another book's ``dump()``; accounts that it does not know stay, spending is the larger one.

        Raises ValueError when it does not have its shape; nothing has changed then.
        """
        own = dict(self._accounts)
        self.load(state)
        for key, account in own.items():
            newer = self._accounts.get(key)
            if newer is None:
                self._accounts[key] = account
            elif newer.month == account.month:
                newer.spent = {unit: max(amount, account.spent[unit]) for unit, amount in newer.spent.items()}

    def dump(self) -> Json:
        """Accounts and open reservations as JSON values."""
        return {
            "accounts": [
                {
                    "key": list(account.key),
                    "buckets": {name: asdict(bucket) for name, bucket in account.buckets.items()},
                    "month": account.month,
                    "spent": dict(account.spent),
                }
                for account in self._accounts.values()
            ],
            "reservations": {
                str(job_id): {
                    **asdict(reservation),
                    "rates": [[list(key), list(rates)] for key, rates in reservation.rates.items()],
                }
                for job_id, reservation in self._open.items()
            },
        }

    def load(self, state: Json) -> None:
        """Replace everything by another book's ``dump()``. Raises ValueError when that does not have its shape."""
        try:
            accounts = [_loaded_account(item) for item in state.get("accounts", [])]
            opened = {JobId(name): _loaded_reservation(item) for name, item in state.get("reservations", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the dump of a quota policy: {error}") from error
        self._open = opened
        self._accounts = OrderedDict((account.key, account) for account in accounts)
        for reservation in opened.values():
            for key in reservation.rates:
                account = self._accounts.setdefault(key, Account(key, month=reservation.month))
                account.reservations += 1
                if reservation.holds:
                    account.held["concurrent"] += 1
                    account.held["queued"] += reservation.waits
                    account.held["kv_tokens"] += reservation.taken["tokens"]
        self._leases = [(reservation.expires_at, job_id) for job_id, reservation in opened.items()]
        heapq.heapify(self._leases)

    def _account(self, wanted: QuotaAccount, at: Instant) -> Account:
        key = _key(wanted)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(key, month=at.month, checked_at=at.now)
        account.adopt(wanted.limits, at)
        return account

    def _leave(self, reservation: Reservation, at: Instant) -> list[Account]:
        """It is no longer open; its accounts, brought up to date."""
        self._free(reservation)
        accounts = [self._accounts[key] for key in reservation.rates]
        for account in accounts:
            account.reservations -= 1
            account.refresh(at)
        return accounts

    def _free(self, reservation: Reservation) -> None:
        if reservation.holds:
            reservation.holds = False
            for key in reservation.rates:
                account = self._accounts[key]
                account.free("concurrent", 1)
                account.free("queued", int(reservation.waits))
                account.free("kv_tokens", reservation.taken["tokens"])

    def _sweep(self, at: Instant) -> None:
        for _ in range(_SWEEP):
            key, account = next(iter(self._accounts.items()), (None, None))
            if key is None or account is None or at.now - account.checked_at < _SWEEP_AFTER_S:
                return
            if account.idle(at, keep_spent=self._keep_spent and key[0] in BUDGETED):
                del self._accounts[key]
            else:
                account.checked_at = at.now
                self._accounts.move_to_end(key)


def _key(account: QuotaAccount) -> AccountKey:
    return account.level, account.tenant, account.name


def _tightest(accounts: list[Account], at: Instant) -> dict[str, LimitState]:
    found: dict[str, LimitState] = {}
    for account in accounts:
        headers = account.headers(at)
        if not found:
            found = headers
            continue
        for header, state in headers.items():
            tighten(found, header, state)
    return found


def _gravity(objection: Objection) -> tuple[bool, float]:
    """What never passes goes before what passes late."""
    return objection.never, objection.wait_s


def _refusal(
    worst: Objection, job: Job, accounts: tuple[QuotaAccount, ...], remaining: dict[str, LimitState]
) -> QuotaDecision:
    if not worst.never:
        return QuotaDecision(False, worst.limit, worst.cost, worst.wait_s, remaining=remaining, level=worst.level)
    if worst.unit == "currency":
        text = f"It may cost up to {money(worst.cost)}, but {worst.limit} is {money(worst.maximum)}"
    elif worst.cost > 1:
        what = worst.unit.replace("_", " ").replace("kv", "KV")
        text = f"It asks for up to {worst.cost} {what} at once, but {worst.limit} is {worst.maximum}"
    else:
        text = f"{worst.limit} is {worst.maximum}"
    room = most_output(accounts, job.prompt_tokens, job.price)
    if worst.unit not in _WITHOUT_OUTPUT and room is not None and room[0] > 0:
        text += f"; with its {job.prompt_tokens} prompt tokens, max_tokens can be at most {room[0]}"
    return QuotaDecision(
        False, worst.limit, worst.cost, never=True, remaining=remaining, message=f"{text}.", level=worst.level
    )


def _loaded_account(item: Json) -> Account:
    level, tenant, name = item["key"]
    buckets = {str(limit): Bucket(**bucket) for limit, bucket in item["buckets"].items()}
    spent = {unit: int(item["spent"][unit]) for unit in ("tokens", "currency")}
    return Account((level, tenant, name), buckets=buckets, month=int(item["month"]), spent=spent)


def _loaded_reservation(item: Json) -> Reservation:
    fields = dict(item)
    entry = dict(fields.pop("entry"))
    price = entry.pop("price")
    rates = {(level, tenant, name): tuple(limits) for (level, tenant, name), limits in fields.pop("rates")}
    return Reservation(Entry(**entry, price=TokenPrice(**price) if price else None), rates=rates, **fields)
