"""What the ledger says of the past: sums by day, in one query each. Blocking; call it in a thread."""

from __future__ import annotations

import contextlib
from datetime import date, timedelta
from pathlib import Path

from policies.quota._ledger_file import read
from policies.types import DeviceTime, DeviceUse, UsageQuery, UsageRow

DIMENSIONS = ("organisation", "tenant", "user", "model", "class", "cost_centre", "day")
MOST_DAYS = 400
_SUMS = ("requests", "prompt", "cached", "output", "cost", "device_ns", "recompute_ns", "retry_ns")


def usage(path: Path, query: UsageQuery) -> list[UsageRow]:
    """Rows in the order of their groups. Raises ValueError for an unknown dimension, LedgerError."""
    unknown = [name for name in (*query.group_by, *query.only) if name not in DIMENSIONS]
    if unknown:
        raise ValueError(f"unknown dimension {unknown[0]!r} (known: {', '.join(DIMENSIONS)})")
    groups = ", ".join(query.group_by)
    sums = ", ".join(f"coalesce(sum({name}), 0)" for name in _SUMS)
    days, span = _days(query)
    wanted = [days, *(f"{name} = ?" for name in query.only)]
    tail = f"GROUP BY {groups} ORDER BY {groups}" if groups else ""
    first = f"{groups}, " if groups else ""
    text = f"SELECT {first}{sums} FROM usage WHERE {' AND '.join(wanted)} {tail}"  # noqa: S608 - names checked above
    found = []
    for row in read(path, text, (*span, *query.only.values())):
        names, sums_of = row[: len(query.group_by)], row[len(query.group_by) :]
        requests, prompt, cached, output, cost, device_ns, recompute_ns, retry_ns = sums_of
        found.append(
            UsageRow(
                dict(zip(query.group_by, names, strict=True)),
                requests,
                prompt,
                cached,
                output,
                cost,
                DeviceTime(device_ns, recompute_ns, retry_ns),
            )
        )
    return found


def _days(query: UsageQuery) -> tuple[str, list[str]]:
    """The condition on days, and its values.

    Of one tenant each day is looked up by itself: the table is in the order of days and tenants, and a range would read
    everybody's rows for a caller who asks for its own.
    """
    if "tenant" in query.only:
        with contextlib.suppress(ValueError):  # days that the calendar has not
            first, last = date.fromisoformat(query.first), date.fromisoformat(query.last)
            if 0 <= (last - first).days < MOST_DAYS:
                days = [(first + timedelta(number)).isoformat() for number in range((last - first).days + 1)]
                return f"day IN ({', '.join('?' * len(days))})", days
    return "day >= ? AND day <= ?", [query.first, query.last]


def devices(path: Path, first: str, last: str) -> list[DeviceUse]:
    """What workers did on these days. Raises LedgerError."""
    text = (
        "SELECT day, model, worker, kind, ns FROM devices WHERE day >= ? AND day <= ? ORDER BY day, model, worker, kind"
    )
    return [DeviceUse(*row) for row in read(path, text, (first, last))]
