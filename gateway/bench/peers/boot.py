"""``PYTHON -P boot.py MODULE``: runs a driver in a peer's interpreter, which has none of our packages installed.

The packages on the way to the driver are made here by hand, so that their folder need not be on the import path: in an
installed copy of ours it holds all our libraries, and the peer must use its own.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


def main(name: str) -> int:
    """Prepare, then hand standard input and the true standard output to the driver."""
    for package, folder in (
        ("gateway", HERE.parents[1]),
        ("gateway.bench", HERE.parent),
        ("gateway.bench.peers", HERE),
    ):
        module = ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module
    # Libraries write what they like to standard output; answers go out on a copy of it that only the driver knows.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    wire = importlib.import_module("gateway.bench.peers.wire")
    driver = importlib.import_module(f"gateway.bench.peers.{name}")
    return int(wire.serve(driver.open_engine, sys.stdin, answers))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
