"""The garbage collector, told what not to look at. In a process of its own: this one's stays as it is."""

from __future__ import annotations

import gc
import subprocess
import sys

from gateway.collection import without_collection
from tests.arch.source import ROOT

PROGRAM = """
import gc, weakref
from gateway.collection import YOUNG_OBJECTS, keep_what_is_here

class Node: pass

def ring():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = ring()
keep_what_is_here()
assert before() is None, "garbage is not kept"
assert gc.get_freeze_count() > 1000
assert gc.isenabled() and gc.get_threshold()[0] == YOUNG_OBJECTS
rings = [ring() for _ in range(2 * YOUNG_OBJECTS)]
assert sum(r() is not None for r in rings) < 1.5 * YOUNG_OBJECTS, "what comes later is still collected"
print("held")
"""


def test_what_is_there_is_kept_and_what_comes_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "held\n", done.stderr


def test_a_stretch_without_it_ends_as_it_began() -> None:
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
