"""What the ledger says of the past: sums by day, in one query each. Blocking; call it in a thread."""

from __future__ import annotations

from pathlib import Path

from policies.quota._ledger_file import read
from policies.types import DeviceTime, DeviceUse, UsageQuery, UsageRow

DIMENSIONS = ("organisation", "tenant", "user", "model", "class", "cost_centre", "day")
_SUMS = ("requests", "prompt", "cached", "output", "cost", "device_ns", "recompute_ns", "retry_ns")


def usage(path: Path, query: UsageQuery) -> list[UsageRow]:
    """Rows in the order of their groups. Raises ValueError for an unknown dimension, LedgerError."""
    unknown = [name for name in (*query.group_by, *query.only) if name not in DIMENSIONS]
    if unknown:
        raise ValueError(f"unknown dimension {unknown[0]!r} (known: {', '.join(DIMENSIONS)})")
    groups = ", ".join(query.group_by)
    sums = ", ".join(f"coalesce(sum({name}), 0)" for name in _SUMS)
    wanted = ["day >= ?", "day <= ?", *(f"{name} = ?" for name in query.only)]
    tail = f"GROUP BY {groups} ORDER BY {groups}" if groups else ""
    first = f"{groups}, " if groups else ""
    text = f"SELECT {first}{sums} FROM usage WHERE {' AND '.join(wanted)} {tail}"  # noqa: S608 - names checked above
    found = []
    for row in read(path, text, (query.first, query.last, *query.only.values())):
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


def devices(path: Path, first: str, last: str) -> list[DeviceUse]:
    """What workers did on these days. Raises LedgerError."""
    text = (
        "SELECT day, model, worker, kind, ns FROM devices WHERE day >= ? AND day <= ? ORDER BY day, model, worker, kind"
    )
    return [DeviceUse(*row) for row in read(path, text, (first, last))]
