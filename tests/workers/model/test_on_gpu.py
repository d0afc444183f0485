"""What only a GPU can show (``make test-gpu``); what runs on both devices is parametrised there (``places.py``)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench
from tests.workers.model.matrix import COMBINATIONS, Cell, Models, model_of
from tests.workers.model.oracle import Case
from tests.workers.model.test_attention import MIXED, Ragged
from tests.workers.model.test_parity import cut_cases
from tests.workers.model.test_scores import hold_scores
from workers.config import EngineConfig
from workers.model.loading import load
from workers.protocol import Generate

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGED = ["triton", *(["flashinfer"] if find_spec("flashinfer") else [])]
__all__ = ["cut_cases"]

CELLS = [
    Cell(together, chunk, cache, tight, 4, 7 if together and tight else 4)
    for together, chunk, cache, tight in COMBINATIONS
    if chunk in (7, 64)
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_directory(tiny.model(9, hidden_size=64, head_dim=64), tmp_path_factory.mktemp("gpu") / "m")


def engine(**changes: Any) -> EngineConfig:
    return EngineConfig.model_validate({"device": "cuda", "blocks": 64, "block_size": 16, **changes})


@pytest.mark.parametrize("attention", ["triton", "batched", "reference"])
def test_scores_of_prompts(attention: str, directory: Path) -> None:
    hold_scores(directory, attention, "cuda")


@pytest.mark.parametrize("attention", ["triton", "batched"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell(cell: Cell, attention: str, smollm2_cut: Path, cut_cases: list[Case], models: Models) -> None:
    """All 50 prompts, in fp32, recorded decodes and all."""
    config = cell.engine(attention, "cuda")
    cell.run(cut_cases, model_of(models, smollm2_cut, config), attention, "cuda")


@pytest.mark.parametrize("attention", [*PAGED, "batched"])
def test_bfloat16_stays_near_fp32(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.workers.model import test_attention

    monkeypatch.setattr(test_attention, "HEAD_DIM", 64)
    ragged = Ragged.make(6, 9, 3, MIXED)
    found = ragged.run(attention, 16, list(range(100)), torch.bfloat16, fill=0.0, device=CUDA)
    np.testing.assert_allclose(found.float().numpy(), ragged.exact(), atol=0.05)


@pytest.mark.parametrize("attention", PAGED)
def test_recorded_steps_give_the_same_tokens(attention: str, directory: Path) -> None:
    """In one precision, the same kernels: more running than the smallest bucket, fewer than the largest."""
    requests = [Generate(str(i), [5 + i, 9, 30 + i, 7], 12, GREEDY) for i in range(11)]
    found = []
    for graphs in (True, False):
        bench = Bench(directory, engine(attention=attention, dtype="bfloat16", cuda_graphs=graphs))
        found.append([one.tokens for one in bench.run(requests, stagger=1)])
        assert ("recorded" in bench.model.attention) == graphs
    assert found[0] == found[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("attention", PAGED)
def test_another_device_than_the_first(attention: str, directory: Path) -> None:
    """Recorded there, and replayed by another thread than the one that recorded."""
    requests = [Generate(str(i), [5 + i, 9, 30 + i, 7], 12, GREEDY) for i in range(3)]
    found = []
    for device in ("cuda:0", "cuda:1"):
        bench = Bench(directory, engine(attention=attention, dtype="bfloat16", device=device))
        with ThreadPoolExecutor(1) as thread:
            found.append([one.tokens for one in thread.submit(bench.run, requests).result()])
    assert found[0] == found[1]


def test_nothing_is_compiled_after_the_start(directory: Path) -> None:
    """engine H9."""
    from workers.model.attention import paged_triton

    bench = Bench(directory, engine(attention="triton", dtype="bfloat16"))
    compiled = [len(cache[0]) for cache in paged_triton._attend.device_caches.values()]
    bench.run([Generate(str(i), list(range(3, 20 + 5 * i)), 9, GREEDY) for i in range(7)], stagger=2)
    assert [len(cache[0]) for cache in paged_triton._attend.device_caches.values()] == compiled


def test_auto_takes_a_kernel_over_block_tables(directory: Path) -> None:
    assert load(directory, engine()).attention.split(",")[0] in ("flashinfer", "triton")
