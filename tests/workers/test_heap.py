"""What was there before is not looked at any more, what comes afterwards is."""

from __future__ import annotations

import gc
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
        assert count == gc.get_freeze_count() > 1000
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
