"""A step whose buffers do not fit is an error of that step, not the end of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.workers.model import tiny

PROGRAM = """
import resource, sys
from pathlib import Path
from tests.workers.model.native.by_hand import Kernel
from workers.engine.loop import is_out_of_memory

threads, room, rows = map(int, sys.argv[2:])
kernel = Kernel(Path(sys.argv[1]))
fine = kernel.run(([5, 6, 7], 0, [3]))
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + room, resource.RLIM_INFINITY))
kernel.decoder._threads = threads
try:
    kernel.decoder._grow(rows, 16)
except MemoryError as error:
    assert is_out_of_memory(error)
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
kernel.decoder._threads = 2
assert (kernel.run(([5, 6, 7], 0, [3])) == fine).all()
print("went on")
"""
MIB = 2**20


@pytest.mark.parametrize(
    ("threads", "room", "rows"), [(2, 256 * MIB, 2**30), (64, 64 * MIB, 128)], ids=["buffers", "threads"]
)
def test_a_step_without_memory_raises_and_the_next_one_runs(tmp_path: Path, threads: int, room: int, rows: int) -> None:
    """An exception of C++ that crossed into C would end the worker, with every request it has."""
    directory = tiny.write_directory(tiny.model(1, hidden_size=64, head_dim=16), tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), str(threads), str(room), str(rows)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    message, end = done.stdout.splitlines()
    assert f"{rows} rows" in message
    assert "engine.max_step_tokens" in message
    assert end == "went on"
