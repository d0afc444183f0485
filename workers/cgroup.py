"""What this process's control groups allow, its own and all around it, in version 2 and 1. Standard library only.

A container's own group is the root of what it sees; a service's lies deeper. Limits of either count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 2**63
"""Bytes, beyond every memory. Version 1 writes a number near it where there is no limit."""


def cores(root: Path = ROOT, own: Path = OWN) -> float:
    """How many cores' time it gets, whatever cores it may run on; inf where no group says."""
    found = inf
    for group in _groups(root, own, ""):
        with suppress(OSError, ValueError):
            quota, period = _text(group / "cpu.max").split()
            found = min(found, inf if quota == "max" else int(quota) / max(1, int(period)))
    for group in _groups(root / "cpu", own, "cpu"):
        with suppress(OSError, ValueError):
            quota = _text(group / "cpu.cfs_quota_us")
            if int(quota) > 0:
                found = min(found, int(quota) / max(1, int(_text(group / "cpu.cfs_period_us"))))
    return found


def memory(root: Path = ROOT, own: Path = OWN) -> int:
    """Bytes that are left to it; ``NO_LIMIT`` where no group says. Files' pages that could go count as left."""
    found = NO_LIMIT
    for controller, names in (("", ("memory.max", "memory.current")), ("memory", _OLD)):
        for group in _groups(root / controller, own, controller):
            with suppress(OSError, ValueError):
                limit, used = (_text(group / name) for name in names)
                if limit != "max" and int(limit) < NO_LIMIT // 2:
                    found = min(found, max(0, int(limit) - max(0, int(used) - _idle(group))))
    return found


_OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _idle(group: Path) -> int:
    """Bytes of files that nobody has looked at lately: they go before anybody runs out of memory. Version 1 tells those
    of the group itself first, then ``total_``, with those of the groups below, which its use counts too."""
    found = 0
    with suppress(OSError, ValueError):
        for line in _text(group / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                found = max(found, int(value))
    return found


def _groups(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """``root`` and the groups below it that this process is in. ``controller``: of version 1, empty for version 2."""
    yield root
    with suppress(OSError, ValueError):
        for line in _text(own).splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(",") and ".." not in Path(path).parts:
                group = root
                for part in Path(path).parts[1:]:
                    group = group / part
                    yield group


def _text(path: Path) -> str:
    return path.read_text().strip()
