"""Kernels of libraries go to the device that a worker was given, in the thread that loads and in the one that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.model import tiny
from workers.config import EngineConfig
from workers.engine.plan import Chunk, StepPlan
from workers.engine.sequence import Sequence
from workers.model import loading, runner
from workers.model.current import work_on
from workers.model.runner import TorchRunner
from workers.protocol import SamplingParams


def test_a_thread_is_told_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    for name in ("cpu", "cuda", "cuda:1"):
        work_on(torch.device(name))
    assert told == [torch.device("cuda:1")]


def test_whoever_loads_or_runs_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread is another than the one that loaded."""
    told: list[torch.device] = []
    for module in (loading, runner):
        monkeypatch.setattr(module, "work_on", told.append)
    folder = tiny.write_directory(tiny.model(), tmp_path)
    made = loading.load(folder, EngineConfig(device="cpu", dtype="float32", attention="batched", blocks=4)).runner
    assert isinstance(made, TorchRunner)
    assert told == [torch.device("cpu")]
    one = Sequence("s", 0, [5, 6], 2, 4, SamplingParams(temperature=0.0), blocks=[0])
    made.run(StepPlan(1, [Chunk(one, 0, 2, (one,))]))
    made.likeliest([Chunk(one, 0, 2, (one,))])
    made.logits(Chunk(one, 0, 2))
    assert told == [torch.device("cpu")] * 4
