"""Usage and cost reports from what the ledger remembers: rows by group, their sum, and where the devices' time went.

Rules
- Money is exact: billionths inside, decimal text outside. Seconds are rounded to milliseconds.
- Days are UTC, both ends included.
- In CSV a name that a spreadsheet would run as a formula gets an apostrophe in front: users' names are not ours.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from gateway.errors import ApiError, bad_request, unavailable
from gateway.settings_quota import Prices
from policies.quota.limits import PER_UNIT, money
from policies.spi import UsageReports
from policies.types import DeviceTime, DeviceUse, UsageQuery, UsageRow

GROUPS = ("organisation", "tenant", "user", "model", "class", "cost_centre", "day")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a cell begins with that a spreadsheet computes; some take the wide forms too."""
_NS_PER_HOUR = 3600 * 10**9


def today() -> date:
    """The day by which reports are kept."""
    return datetime.now(UTC).date()


def query(
    group_by: Sequence[str] = (), first: str | None = None, last: str | None = None, only: dict[str, str] | None = None
) -> UsageQuery:
    """What a caller asks for; from the first of this month until today where it does not say. Raises ApiError 400."""
    for name in group_by:
        if name not in GROUPS:
            raise bad_request(f"group_by: {name[:64]!r} is none of {', '.join(GROUPS)}.", param="group_by")
    if len(set(group_by)) < len(group_by):
        raise bad_request("group_by: name each group once.", param="group_by")
    end = _day(last, "to", today())
    begin = _day(first, "from", end.replace(day=1))
    if begin > end:
        raise bad_request(f"from: {begin} is after to ({end}).", param="from")
    return UsageQuery(begin.isoformat(), end.isoformat(), tuple(group_by), only or {})


def _day(text: str | None, param: str, otherwise: date) -> date:
    if text is None:
        return otherwise
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise bad_request(f"{param}: {text[:32]!r} is no day; write YYYY-MM-DD (UTC).", param=param) from None


@dataclass(frozen=True, slots=True)
class Report:
    """One report, in numbers."""

    query: UsageQuery
    rows: list[UsageRow]
    devices: list[DeviceUse]
    prices: Prices

    def as_json(self) -> dict[str, Any]:
        """For the admin API."""
        return {
            "from": self.query.first,
            "to": self.query.last,
            "group_by": list(self.query.group_by),
            "currency": self.prices.currency,
            "rows": [self._row(row) for row in self.rows],
            "total": self._row(total(self.rows)),
            "devices": self._devices(),
        }

    def _row(self, row: UsageRow) -> dict[str, Any]:
        return {**row.group, **figures(row), **device_figures(row, self.prices)}

    def _devices(self) -> dict[str, Any]:
        """Where the time of all workers went: the kinds add up to wall time · devices."""
        kinds: dict[str, int] = {}
        for use in self.devices:
            kinds[use.kind] = kinds.get(use.kind, 0) + use.ns
        ns = sum(kinds.values())
        found: dict[str, Any] = {"seconds": {kind: _seconds(kinds[kind]) for kind in sorted(kinds)}}
        found["total_seconds"] = _seconds(ns)
        if self.prices.price_per_device_hour is not None:
            found["cost"] = money(_device_cost(ns, self.prices.price_per_device_hour))
        return found


def figures(row: UsageRow) -> dict[str, Any]:
    """Tokens and money of one row."""
    return {
        "requests": row.requests,
        "input_tokens": row.prompt + row.cached,
        "cached_tokens": row.cached,
        "output_tokens": row.output,
        "cost": money(row.cost),
    }


def device_figures(row: UsageRow, prices: Prices) -> dict[str, Any]:
    """Device time of one row, and what that costs the operator where the price of an hour is known."""
    device = row.device
    found: dict[str, Any] = {
        "device_seconds": _seconds(device.computed_ns),
        "recompute_seconds": _seconds(device.recompute_ns),
        "retry_seconds": _seconds(device.retry_ns),
    }
    if prices.price_per_device_hour is not None:
        cost = _device_cost(device.total_ns, prices.price_per_device_hour)
        tokens = row.prompt + row.cached + row.output
        found["device_cost"] = money(cost)
        found["device_cost_per_request"] = money(cost // row.requests) if row.requests else None
        found["device_cost_per_1k_tokens"] = money(cost * 1000 // tokens) if tokens else None
    return found


def total(rows: Iterable[UsageRow]) -> UsageRow:
    """The sum of all rows."""
    requests = prompt = cached = output = cost = 0
    device = DeviceTime()
    for row in rows:
        requests, prompt, cached = requests + row.requests, prompt + row.prompt, cached + row.cached
        output, cost, device = output + row.output, cost + row.cost, device + row.device
    return UsageRow({}, requests, prompt, cached, output, cost, device)


async def report(quota: object, wanted: UsageQuery, prices: Prices) -> Report:
    """Ask the live quota policy. Raises ApiError: 409 where it remembers nothing, 503 where it cannot be read."""
    if not isinstance(quota, UsageReports):
        raise ApiError(
            409,
            "Usage is kept by the ledger only: set policies.quota to {use: ledger}, and state.path.",
            type="invalid_request_error",
            code="no_ledger",
        )
    try:
        rows = await quota.usage(wanted)
        return Report(wanted, rows, await quota.device_use(wanted.first, wanted.last), prices)
    except (OSError, ValueError) as error:
        raise unavailable("The ledger cannot be read now. Retry later.", "ledger_unavailable", 5.0) from error


def as_csv(report: Mapping[str, Any]) -> str:
    """The rows of a report's JSON, under a header that is there without rows too."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*report["group_by"], *report["total"]], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _harmless(value) for name, value in row.items()} for row in report["rows"])
    return text.getvalue()


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 3)


def _device_cost(ns: int, per_hour: Decimal) -> int:
    return int(ns * per_hour * PER_UNIT / _NS_PER_HOUR)
