"""From the gateway's request log (``gateway/request_log.py``) to a traffic log that can be replayed.

Rules
- Only requests that produced output are rows: what was refused has no output length. How many were left out is told.
- Arrivals count from the first row. A row's prefix is the deepest digest that another request of its tenant shares.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.simulate.traffic_log import Row, TrafficLogError


@dataclass(slots=True)
class Export:
    """Rows in order of arrival, and what was left out."""

    rows: list[Row] = field(default_factory=list)
    refused: int = 0
    """Requests that produced nothing."""
    foreign: int = 0
    """Lines that are no request lines."""


def export(path: Path, *, tenants: Iterable[str] = (), model: str | None = None) -> Export:
    """Read a request log; only these tenants (none: all) and this model. Raises TrafficLogError."""
    wanted = set(tenants)
    found = Export()
    kept: list[dict[str, Any]] = []
    for line in _lines(path, found):
        if (wanted and line["tenant"] not in wanted) or (model is not None and line.get("model") != model):
            continue
        if line.get("prompt", 0) > 0 and line.get("output", 0) > 0:
            kept.append(line)
        else:
            found.refused += 1
    kept.sort(key=lambda line: float(line["arrival"]))
    shared = Counter((line["tenant"], digest) for line in kept for digest in line.get("prefixes", ()))
    start = float(kept[0]["arrival"]) if kept else 0.0
    found.rows = [_row(line, start, shared) for line in kept]
    return found


def _lines(path: Path, found: Export) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    line = None
                if isinstance(line, dict) and isinstance(line.get("tenant"), str) and _is_number(line.get("arrival")):
                    yield line
                elif text.strip():
                    found.foreign += 1
    except OSError as error:
        raise TrafficLogError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TrafficLogError(f"{path}: is not UTF-8 text") from None


def _row(line: dict[str, Any], start: float, shared: Counter[tuple[str, str]]) -> Row:
    prefix, tokens = "", 0
    for depth, digest in enumerate(line.get("prefixes", ())):
        if shared[line["tenant"], digest] > 1:
            prefix, tokens = digest, 2**depth * int(line.get("block_size", 16))
    return Row(
        arrival=round(float(line["arrival"]) - start, 6),
        tenant=line["tenant"],
        prompt=int(line["prompt"]),
        output=int(line["output"]),
        prefix=prefix,
        prefix_tokens=min(tokens, int(line["prompt"])),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
