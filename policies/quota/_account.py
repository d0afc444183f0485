"""One account: what is left of each of its limits. Mutable; its book is the only writer.

Rules
- ``objections`` looks at everything and takes nothing; ``take`` takes everything and asks nothing.
- A limit that changes is adopted without a refill; one that is new counts from then on (a budget: from the month's
  spending so far, which is kept whether there is a budget or not).
- Spending belongs to one calendar month. That of the month which was left last is kept: a clock that was wrong and is
  set right, in either direction, finds what was spent; corrections reach it too. Those for other months change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from policies.quota._bucket import PAD_S, Bucket
from policies.quota.limits import BUDGETS, HOLDINGS, RATES, Unit, Units, capacity, month_of, month_start
from policies.types import Limits, LimitState, LimitStatus

AccountKey = tuple[str, str, str]
"""Level, tenant, name."""
HELD_RETRY_S = 1.0
"""Nobody knows when a running request ends; ask again soon."""


@dataclass(frozen=True, slots=True)
class Instant:
    """Now, on the monotonic clock that rates run by and on the calendar that budgets run by."""

    now: float
    wall: float
    month: int

    @classmethod
    def at(cls, now: float, wall: float) -> Instant:
        """``now`` of the monotonic clock is the Unix time ``wall``."""
        return cls(now, wall, month_of(wall))

    @property
    def month_left_s(self) -> float:
        """Seconds until the next calendar month."""
        return month_start(self.month + 1) - self.wall


@dataclass(frozen=True, slots=True)
class Objection:
    """One limit's no."""

    limit: str
    unit: str
    level: str
    cost: int
    maximum: int
    wait_s: float
    """Seconds until it would pass, all else equal."""
    never: bool = False


@dataclass(slots=True)
class Account:
    """See the module's rules."""

    key: AccountKey
    limits: Limits = field(default_factory=Limits)
    adopted: bool = False
    """``limits`` are those of a job; before, they are not known."""
    buckets: dict[str, Bucket] = field(default_factory=dict)
    """By limit."""
    closed: tuple[str, ...] = ()
    """Rates that are limited to nothing at all; no bucket is needed to say so."""
    caps: tuple[tuple[str, int], ...] = ()
    """Holdings that are limited, and to how much."""
    budgets: tuple[tuple[str, Unit, int], ...] = ()
    """Likewise."""
    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HOLDINGS, 0))
    month: int = 0
    spent: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "currency": 0})
    """In ``month``, reservations included."""
    left_month: tuple[int, dict[str, int]] | None = None
    """The month that was left last, and what was spent in it."""
    reservations: int = 0
    checked_at: float = 0.0

    def refresh(self, at: Instant) -> None:
        """Bring levels up to date."""
        for bucket in self.buckets.values():
            bucket.refill(at.now)
        if at.month != self.month:
            known, self.left_month = self.left_month, (self.month, self.spent)
            if known is None or known[0] != at.month:
                known = at.month, dict.fromkeys(self.spent, 0)
            self.month, self.spent = known

    def adopt(self, limits: Limits, at: Instant) -> None:
        """Bring levels and limits up to date."""
        self.refresh(at)
        if self.adopted and (limits is self.limits or limits == self.limits):
            return
        self.limits, self.adopted = limits, True
        wanted = {name: limit for name in RATES if (limit := capacity(limits, name)) is not None}
        self.closed = tuple(name for name, limit in wanted.items() if limit <= 0)
        self.caps = tuple((name, limit) for name in HOLDINGS if (limit := capacity(limits, name)) is not None)
        self.budgets = tuple(
            (name, unit, limit) for name, unit in BUDGETS.items() if (limit := capacity(limits, name)) is not None
        )
        for name in RATES:
            limit, bucket = wanted.get(name, 0), self.buckets.get(name)
            if limit <= 0:
                self.buckets.pop(name, None)
            elif bucket is None:
                self.buckets[name] = Bucket.full(limit, at.now, RATES[name].window_s)
            else:
                bucket.adopt(limit, at.now)

    def objections(self, cost: Units, at: Instant) -> list[Objection]:
        """Every limit that does not let ``cost`` pass. Levels must be up to date."""
        found: list[Objection] = []
        for name in self.closed:
            unit = RATES[name].unit
            if cost[unit] > 0:
                found.append(self._objection(name, unit, cost[unit], 0, 0.0))
        for name, bucket in self.buckets.items():
            unit = RATES[name].unit
            if cost[unit] > bucket.level or cost[unit] > bucket.limit:
                found.append(self._objection(name, unit, cost[unit], bucket.limit, bucket.wait(cost[unit])))
        for name, limit in self.caps:
            amount = held_by(name, cost)
            if amount > limit or self.held[name] + amount > limit:
                found.append(self._objection(name, name, amount, limit, HELD_RETRY_S))
        for name, unit, limit in self.budgets:
            if cost[unit] > limit or (cost[unit] and self.spent[unit] + cost[unit] > limit):
                found.append(self._objection(name, unit, cost[unit], limit, at.month_left_s + PAD_S))
        return found

    def _objection(self, limit: str, unit: str, amount: int, maximum: int, wait_s: float) -> Objection:
        never = amount > maximum
        return Objection(limit, unit, self.key[0], amount, maximum, 0.0 if never else wait_s, never)

    def take(self, cost: Units) -> tuple[str, ...]:
        """Take it from every limit; returns the rates it was taken from."""
        for name, bucket in self.buckets.items():
            bucket.take(cost[RATES[name].unit])
        held = self.held
        for name in HOLDINGS:
            held[name] += cost["tokens"] if name == "kv_tokens" else 1
        self.spend(cost, self.month, 1)
        self.reservations += 1
        return tuple(self.buckets)

    def give(self, rates: Iterable[str], units: Units, now: float) -> None:
        """Give ``units`` back to these rates; less than nothing takes more."""
        for name in rates:
            bucket = self.buckets.get(name)
            if bucket is not None:
                bucket.refill(now)
                bucket.take(-units[RATES[name].unit])

    def free(self, name: str, amount: int) -> None:
        """Part of a holding is over."""
        self.held[name] -= amount

    def spend(self, cost: Units, month: int, sign: int) -> None:
        """Correct what was spent in ``month``."""
        left = self.left_month
        spent = self.spent if month == self.month else left[1] if left is not None and month == left[0] else {}
        for unit in spent:
            spent[unit] += sign * cost[unit]

    def idle(self, at: Instant, *, keep_spent: bool) -> bool:
        """Whether nothing is lost by forgetting it. ``keep_spent``: what was spent counts even without a budget."""
        if self.reservations or not all(bucket.is_full(at.now) for bucket in self.buckets.values()):
            return False
        if not keep_spent and all(capacity(self.limits, name) is None for name in BUDGETS):
            return True
        self.refresh(at)
        later = self.left_month is not None and self.left_month[0] > at.month and any(self.left_month[1].values())
        return not later and not any(self.spent.values())

    def headers(self, at: Instant) -> dict[str, LimitState]:
        """The tightest limit per header name. Levels must be up to date."""
        found: dict[str, LimitState] = {}
        for name, bucket in self.buckets.items():
            header, state = RATES[name].header, LimitState(bucket.limit, bucket.left, bucket.reset_s)
            if header in found:
                tighten(found, header, state)
            else:
                found[header] = state
        budget = self.limits.tokens_per_month
        if budget is not None:
            left = max(0, budget - self.spent["tokens"])
            tighten(found, "tokens", LimitState(budget, left, at.month_left_s))
        return found

    def status(self, at: Instant) -> Iterator[LimitStatus]:
        """Every limit that is set, with what is left. Levels must be up to date."""
        level, _, name = self.key
        for limit, bucket in self.buckets.items():
            yield LimitStatus(level, name, limit, bucket.limit, bucket.left, bucket.reset_s)
        for limit in HOLDINGS:
            maximum = capacity(self.limits, limit)
            if maximum is not None:
                yield LimitStatus(level, name, limit, maximum, max(0, maximum - self.held[limit]), None)
        for limit, unit in BUDGETS.items():
            maximum = capacity(self.limits, limit)
            if maximum is not None:
                left = max(0, maximum - self.spent[unit])
                yield LimitStatus(level, name, limit, maximum, left, at.month_left_s)


def held_by(holding: str, cost: Units) -> int:
    """How much of a holding one job takes."""
    return cost["tokens"] if holding == "kv_tokens" else 1


def tighten(found: dict[str, LimitState], header: str, state: LimitState) -> None:
    """Keep the limit with the least left."""
    known = found.get(header)
    if known is None or (state.remaining, state.limit) < (known.remaining, known.limit):
        found[header] = state
