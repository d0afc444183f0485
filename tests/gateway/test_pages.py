"""Large pages: which memory is worth them, and that what is in it stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gateway.pages import LARGE, large_pages, use_large_pages
from tests.arch.source import ROOT

SMAPS = """\
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                8000 kB
7f0001000000-7f0001800000 rw-p 00000000 00:00 0
Rss:                  16 kB
7f0002000000-7f0002200000 rw-p 00000000 00:00 0                          [heap]
Rss:                2048 kB
7f0003000000-7f0003200000 r-xp 00000000 00:00 0
Rss:                2048 kB
7f0004000000-7f0004200000 rw-p 00000000 fe:01 77                         /usr/lib/x.so
Rss:                2048 kB
7f0005000000-7f0005200000 rw-p 00000000 00:00 0                          [stack]
Rss:                2048 kB
7f0006000000-7f0006100000 rw-p 00000000 00:00 0
Rss:                1024 kB
"""

PROGRAM = """
from gateway.pages import use_large_pages
kept = [str(number) for number in range(300_000)]
assert use_large_pages() >= 0
assert kept == [str(number) for number in range(300_000)]
print("held")
"""


def test_full_anonymous_memory_alone_is_worth_it() -> None:
    """Not a stack that is hardly used, nothing of a file, nothing smaller than a large page."""
    assert list(large_pages(SMAPS.splitlines())) == [
        *(0x7F0000200000 + LARGE * place for place in range(3)),
        0x7F0002000000,
    ]


def test_nothing_happens_where_the_system_does_not_tell() -> None:
    assert use_large_pages(Path("/nowhere/smaps")) == 0


def test_what_is_in_memory_stays() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "held\n", done.stderr
