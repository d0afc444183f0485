"""The kernel's threads: engines that come and go, more threads than cores, several engines at once, a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.workers.model import tiny
from tests.workers.model.native.by_hand import Kernel, answer, ids

COUNTS = (1, 2, 3, 5, 7, 13)
"""Threads of an engine: even, odd, and more than there are cores."""

FORKED = """
import os, signal, sys
from pathlib import Path
from tests.workers.model.native.by_hand import Kernel, answer

kernel = Kernel(Path(sys.argv[1]), threads=3)
before = answer(kernel)
child = os.fork()
if not child:
    signal.alarm(60)  # a child that hangs must not outlive its test
    same = answer(kernel) == before
    kernel.decoder.close()  # there is nobody to wait for: its threads stayed with the parent
    os._exit(0 if same and answer(Kernel(Path(sys.argv[1]), threads=3)) == before else 1)
for _ in range(50):
    assert answer(kernel) == before
assert os.waitpid(child, 0)[1] == 0, "the child computes something else, or hangs"
print("done")  # and ends while the kernel's threads sleep: nobody closed it
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_directory(tiny.model(1, hidden_size=64, head_dim=16), tmp_path_factory.mktemp("model"))


def test_threads_come_and_go(directory: Path) -> None:
    """Made, used or not, and ended hundreds of times: no thread is lost, none hangs, and no bit depends on how many."""
    wanted = answer(Kernel(directory, threads=2))
    for threads in COUNTS:
        kernel = Kernel(directory, threads=threads)
        for turn in range(60):
            kernel.decoder._grow(64, 16)
            if turn % 3:  # else it ends before its threads have slept once
                kernel.run((ids(20), 0, [1, 2]))
            kernel.decoder.close()
        assert answer(kernel) == wanted
        kernel.decoder.close()


def test_engines_beside_each_other(directory: Path) -> None:
    """Each is stepped by a thread of its own, as two models in one process are; together they have a dozen threads."""
    wanted = answer(Kernel(directory))

    def steps(threads: int) -> bool:
        kernel = Kernel(directory, threads=threads)
        return all(answer(kernel) == wanted for _ in range(40))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(steps, (1, 2, 3, 5)))


def test_the_caller_may_change(directory: Path) -> None:
    """The step's first thread is whoever calls: also one that did not make the engine, and that ends meanwhile."""
    kernel, wanted = Kernel(directory, threads=3), answer(Kernel(directory))
    for _ in range(20):
        with ThreadPoolExecutor(1) as caller:
            assert caller.submit(answer, kernel).result() == wanted


def test_a_forked_child_computes_without_the_threads(directory: Path) -> None:
    """A fork has the engine but none of its threads; the caller does all tasks, and ending it waits for nobody.

    torch, which compares and packs here, gets one thread: OpenMP's do not survive a fork.
    """
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(directory)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
