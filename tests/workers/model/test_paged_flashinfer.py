"""How FlashInfer's wrappers are called, with a stand-in that has their signatures: its kernels need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.workers.model import fake_flashinfer, oracle, tiny
from tests.workers.model.graphs import eager
from tests.workers.model.harness import GREEDY, Bench
from tests.workers.model.test_attention import MIXED, SHAPES, Ragged
from workers.config import EngineConfig
from workers.model.attention import paged_flashinfer
from workers.model.attention.paged_flashinfer import FlashInferAttention
from workers.model.loading import load
from workers.protocol import Generate


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(FlashInferAttention, "unsupported", lambda shape, device: None)
    monkeypatch.setattr(paged_flashinfer, "WORKSPACE_BYTES", fake_flashinfer.WORKSPACE)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("shapes", [MIXED, [(70, 1), (1, 1)], [(33, 9), (3, 3)]], ids=["mixed", "decodes", "prompts"])
def test_against_the_formula(heads: int, kv_heads: int, shapes: list[tuple[int, int]]) -> None:
    """Decodes at the front go to one wrapper, the rest to the other; foreign slots hold NaN."""
    ragged = Ragged.make(1, heads, kv_heads, sorted(shapes, key=lambda shape: shape[1] != 1))
    np.testing.assert_allclose(ragged.run("flashinfer", 16, list(range(100))).numpy(), ragged.exact(), atol=2e-5)


@pytest.mark.parametrize("recorded", [False, True])
def test_under_the_engine_its_tokens_are_transformers(tmp_path: Path, recorded: bool) -> None:
    """engine H1 and H3: prefix hits, chunks, preemption and mixed steps; recorded steps read their own buffers only,
    which other buckets share, and their spare rows lie in the scratch block."""
    directory = tiny.write_directory(tiny.model(5), tmp_path / "m")
    prompts = [[(3 * place + 7 * own) % 290 for place in range(9 + 5 * own)] for own in range(4)]
    cases = oracle.greedy(directory, [*prompts, prompts[3]], 24)
    engine = EngineConfig(
        device="cpu", dtype="float32", attention="flashinfer", blocks=14, block_size=4, max_chunk_tokens=5, threads=1
    )
    model = load(directory, engine)
    assert model.attention == "flashinfer"
    replays = eager(model, most=3) if recorded else []
    bench = Bench("", engine, model)
    requests = [Generate(str(index), case.prompt, 24, GREEDY) for index, case in enumerate(cases)]
    for finished, case in zip(bench.run(requests, stagger=2), cases, strict=True):
        assert finished.tokens[: len(case.expected)] == case.expected
    assert bench.preemptions > 0
    assert set(replays) == ({1, 2, 3} if recorded else set())
