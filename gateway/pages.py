"""Large pages for memory that stays: what a process has when it begins to serve, Python's heap with all of its code.

A request that comes alone finds the caches full of what others left there, the one for addresses first (TLB): what it
touches lies on a thousand pages of 4 KiB, and each costs a walk through tables, in a virtual machine through two. On
pages of 2 MiB they are some fifty.

Rules
- Linux only; where the kernel does not do it, or not now, nothing happens: it is never needed.
- Only anonymous private memory is moved, in whole large pages; addresses stay. Of areas that are hardly used, threads'
  stacks say, nothing is: it would take memory for what is not there.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

LARGE = 2 << 20
_FULL = 0.75
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
"""Since Linux 6.1: at once, and not when the kernel comes round to it."""


def use_large_pages(smaps: Path = Path("/proc/self/smaps")) -> int:
    """Put what is there on large pages; how many these are."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        lines = smaps.read_text().splitlines()
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return 0
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    for address in large_pages(lines):
        advise(address, LARGE, _MADV_HUGEPAGE)
        done += advise(address, LARGE, _MADV_COLLAPSE) == 0
    return done


def large_pages(lines: Iterable[str]) -> Iterator[int]:
    """Addresses of the large pages that lie wholly in such memory, by the lines of ``/proc/*/smaps``."""
    begin = end = 0
    for line in lines:
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
            if rest[0] != "rw-p" or rest[3] != "0" or rest[4:] not in ([], ["[heap]"]):
                end = begin
        elif first == "Rss:" and int(rest[0]) * 1024 >= _FULL * (end - begin):
            yield from range(-(-begin // LARGE) * LARGE, end - LARGE + 1, LARGE)
