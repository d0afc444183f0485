"""What was there before is not looked at any more, what comes afterwards is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

from workers import heap


class Ring:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.me = self


def test_only_what_comes_later_is_collected() -> None:
    early = Ring()
    left = weakref.ref(early)
    try:
        count = heap.settle()
        assert count >= gc.get_freeze_count() > 1000  # other threads may have let go of some since
        assert not any(one is early for one in gc.get_objects())
        late = Ring()
        gone = weakref.ref(late)
        del early, late
        gc.collect()
        assert gone() is None
        assert left() is not None
    finally:
        heap.release()
    gc.collect()
    assert left() is None


FRAGMENTS = """
import os
from workers import heap

def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

rows = [(b"x" * (100_000 + i), b"y" * (1000 + i)) for i in range(600)]  # 60 MB, each followed by what stays
rows = [small for _, small in rows]
before = held()
heap.settle()
print(before - held())
"""


def test_what_is_free_between_what_stays_goes_back_to_the_system() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTS], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) > 40_000_000
