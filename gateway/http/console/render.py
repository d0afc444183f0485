"""Values → HTML, and the console's own files. Everything is escaped; templates never mark anything as safe.

Templates and static files are read once, at the start: a request reads no disk and names no path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

_FOLDER = Path(__file__).parent
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
NOTHING = "–"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the console."""

    content: bytes
    media_type: str
    digest: str


class Renderer:
    """Templates and static files. One per console."""

    def __init__(self) -> None:
        self.files = {
            path.name: StaticFile(content := path.read_bytes(), _TYPES[path.suffix], _digest(content))
            for path in sorted((_FOLDER / "static").iterdir())
            if path.suffix in _TYPES
        }
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters |= {
            "count": count,
            "percent": percent,
            "duration": duration,
            "pretty": pretty,
            "flow": flow,
            "decimal": decimal,
            "size": size,
        }
        self._environment.globals["asset"] = self._asset

    def html(self, template: str, values: Mapping[str, Any]) -> str:
        """Render a template."""
        return self._environment.get_template(template).render(values)

    def _asset(self, name: str) -> str:
        """URL of a static file; it changes with the content, so that it can be cached for ever."""
        return f"/console/static/{name}?v={self.files[name].digest[:12]}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def count(value: float | None) -> str:
    """``1,234``, ``56.1k``, ``2.3M``."""
    if value is None:
        return NOTHING
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.1f}{unit}"
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def percent(value: float | None) -> str:
    """``42.5%``."""
    return NOTHING if value is None else f"{value * 100:.1f}%"


def decimal(value: float | None, places: int = 2) -> str:
    """A number with so many decimals."""
    return NOTHING if value is None else f"{value:,.{places}f}"


def duration(seconds: float | None) -> str:
    """``0.4 ms``, ``412 ms``, ``3.42 s``, ``2m 05s``, ``3h 10m``."""
    if seconds is None:
        return NOTHING
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def flow(value: Any) -> str:
    """JSON on one line; a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def pretty(value: Any) -> str:
    """JSON with indents."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
