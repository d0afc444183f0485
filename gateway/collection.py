"""Python's garbage collector, kept from looking where it finds nothing: modules, settings, routes; a queue being moved.

A request leaves hardly a cycle behind. By default the collector looks at what is young after every 700 objects, which
is twice a request, and again and again at everything that was there before the first.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG_OBJECTS = 20_000
"""After so many new objects the collector looks at them: what some 60 requests make."""


def keep_what_is_here() -> None:
    """Never look again at what exists now, and seldom at the rest. For a process that is about to serve."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Without it, where much is made and nothing refers to itself: full collections can double the time that takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
