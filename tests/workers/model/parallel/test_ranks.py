"""The real processes: they compute, and whichever is killed, hangs or loses its parent, nothing waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench
from workers.config import EngineConfig
from workers.engine.loop import RunnerLostError
from workers.engine.plan import RunnerGoneError
from workers.protocol import Generate

ENGINE = EngineConfig(device="cpu", dtype="float32", attention="batched", blocks=40, threads=1, rank_timeout_s=3)
SPREAD = ENGINE.model_copy(update={"tensor_parallel": 2})
TOKENS = [(7 * index * index + 3 * index) % 290 for index in range(70)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_directory(tiny.model(3), tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def spread(source: Path) -> Iterator[Bench]:
    bench = Bench(source, SPREAD)
    yield bench
    assert bench.model.ranks is not None
    bench.model.ranks.close()
    assert ranks_of(os.getpid()) == []


def ranks_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if "workers.model.parallel.rank" in child.cmdline()]


def request(name: str) -> Generate:
    return Generate(name, TOKENS[:30], 8, GREEDY)


def test_a_killed_rank_ends_the_engine_at_once(spread: Bench, source: Path) -> None:
    """And before that two processes compute what one does."""
    ranks = spread.model.ranks
    assert ranks is not None
    assert spread.run([request("a")])[0].tokens == Bench(source, ENGINE).run([request("a")])[0].tokens
    assert ranks.alive == 2
    assert not ranks.folder.exists()
    lost = threading.Event()
    ranks.watch(lost.set)
    [rank] = ranks_of(os.getpid())
    rank.kill()
    assert lost.wait(30)
    with pytest.raises(RunnerLostError) as caught:
        spread.run([request("b")])
    assert isinstance(caught.value.__cause__, RunnerGoneError)
    psutil.wait_procs([rank], timeout=30)
    assert ranks.alive == 1


def test_a_rank_that_hangs_fails_the_step_in_time(spread: Bench) -> None:
    spread.run([request("a")])
    [rank] = ranks_of(os.getpid())
    rank.suspend()
    began = time.monotonic()
    with pytest.raises(RunnerLostError, match="did not answer in time"):
        spread.run([request("b")])
    assert time.monotonic() - began < 30


PARENT = """
import sys, time
from pathlib import Path
from workers.config import EngineConfig
from workers.model.loading import load
loaded = load(Path(sys.argv[1]), EngineConfig.model_validate_json(sys.argv[2]))
print("loaded", flush=True)
time.sleep(600)
"""


def test_ranks_die_with_their_parent_and_not_of_its_signals(source: Path) -> None:
    """A terminal's Ctrl-C reaches all of a group: rank 0 decides what it means."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(source), SPREAD.model_dump_json()], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "loaded\n"
        [rank] = ranks_of(parent.pid)
        for number in (signal.SIGINT, signal.SIGTERM):
            rank.send_signal(number)
        time.sleep(0.2)
        assert rank.is_running()
        rank.suspend()  # not even one that cannot notice anything is left
        parent.kill()
        assert psutil.wait_procs([rank], timeout=30)[1] == []
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
