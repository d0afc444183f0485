"""Recorded traffic without content: arrival, tenant, prompt and output length, prefix id. CSV or JSON lines.

Rules
- Arrivals are seconds from the first request, ascending. A prefix id names requests whose prompts begin alike; it says
  nothing of how (the gateway makes it from a keyed digest).
- A file is read whole and checked; the message names file, line and column of the first mistake.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    arrival: float
    """Seconds from the first request."""
    tenant: str
    prompt: int
    """Tokens of the prompt."""
    output: int
    """Tokens produced."""
    prefix: str = ""
    """Requests with the same id begin with the same text; empty: unknown."""
    prefix_tokens: int = 0
    """How many tokens they have in common at most; 0: unknown."""


COLUMNS = tuple(field.name for field in fields(Row))


class TrafficLogError(ValueError):
    """A file that cannot be read; the text names it, the line and the remedy."""


def read(path: Path) -> list[Row]:
    """The rows in order of arrival. Raises TrafficLogError."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [_row(path, line, raw) for line, raw in _raw(path, file)]
    except OSError as error:
        raise TrafficLogError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TrafficLogError(f"{path}: is not UTF-8 text") from None
    return sorted(rows, key=lambda row: row.arrival)


def write(rows: Iterable[Row], file: TextIO, *, as_csv: bool) -> int:
    """Write them in order of arrival; how many."""
    ordered = sorted(rows, key=lambda row: row.arrival)
    if as_csv:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in ordered)
    else:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in ordered)
    return len(ordered)


def _raw(path: Path, file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix.lower() == ".csv":
        reader = csv.DictReader(file)
        missing = [name for name in ("arrival", "tenant", "prompt", "output") if name not in (reader.fieldnames or ())]
        if missing:
            raise TrafficLogError(
                f"{path}: the header line lacks {', '.join(missing)}; columns are {', '.join(COLUMNS)}"
            )
        for raw in reader:
            yield reader.line_num, raw
        return
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            raw = json.loads(text)
        except ValueError:
            raise TrafficLogError(f"{path}:{line}: is not a JSON object (a CSV file's name ends in .csv)") from None
        if not isinstance(raw, dict):
            raise TrafficLogError(f"{path}:{line}: is not a JSON object")
        yield line, raw


def _row(path: Path, line: int, raw: dict[str, Any]) -> Row:
    try:
        row = Row(
            float(raw["arrival"]),
            str(raw["tenant"]),
            int(raw["prompt"]),
            int(raw["output"]),
            str(raw.get("prefix") or ""),
            int(raw.get("prefix_tokens") or 0),
        )
    except KeyError as error:
        raise TrafficLogError(f"{path}:{line}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise TrafficLogError(f"{path}:{line}: {error}") from None
    if not math.isfinite(row.arrival) or row.arrival < 0:
        raise TrafficLogError(f"{path}:{line}: arrival must be seconds of 0 or more, got {row.arrival}")
    if row.prompt < 1 or row.output < 1:
        raise TrafficLogError(
            f"{path}:{line}: prompt and output must be 1 token or more, got {row.prompt}, {row.output}"
        )
    if not row.tenant:
        raise TrafficLogError(f"{path}:{line}: tenant is empty")
    return row
