"""Run by ``test_paged_triton.py`` with TRITON_INTERPRET=1: the kernel against the formula, and under the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.model import oracle, tiny
from tests.workers.model.graphs import eager
from tests.workers.model.harness import GREEDY, Bench
from tests.workers.model.test_attention import MIXED, SHAPES, Ragged
from workers.config import EngineConfig
from workers.model.attention import AttentionShape, backend
from workers.model.loading import load
from workers.protocol import Beams, Generate


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("block_size", [3, 16])
def test_against_the_formula(heads: int, kv_heads: int, block_size: int) -> None:
    """engine H7 and A11: any group size; decodes, prompts, hits and misses in one batch; foreign slots hold NaN."""
    ragged = Ragged.make(1, heads, kv_heads, MIXED)
    found = ragged.run("triton", block_size, list(range(500)))
    np.testing.assert_allclose(found.numpy(), ragged.exact(), atol=2e-5)


@pytest.mark.parametrize("head_dim", [24, 64])
def test_any_head_size(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.workers.model import test_attention

    monkeypatch.setattr(test_attention, "HEAD_DIM", head_dim)
    ragged = Ragged.make(2, 6, 2, MIXED)
    np.testing.assert_allclose(ragged.run("triton", 16, list(range(100))).numpy(), ragged.exact(), atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_placement_does_not_matter(dtype: torch.dtype) -> None:
    """engine H5: the same sequences on other pages, and beside other garbage, bit-equal."""
    ragged = Ragged.make(3, 9, 3, MIXED)
    first = ragged.run("triton", 16, list(range(100)), dtype)
    scattered = np.random.default_rng(0).permutation(100).tolist()
    assert torch.equal(first, ragged.run("triton", 16, scattered, dtype, fill=1e4))
    assert not first.isnan().any()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    ragged = Ragged.make(5, 9, 3, MIXED)
    together = ragged.run("triton", 4, list(range(200)))
    row = 0
    for index, count in enumerate(ragged.counts):
        lone = Ragged([ragged.keys[index]], [ragged.values[index]], [ragged.queries[index]], [count])
        assert torch.equal(lone.run("triton", 4, list(range(200))), together[row : row + count])
        row += count


def test_bfloat16_stays_near_fp32() -> None:
    ragged = Ragged.make(6, 9, 3, MIXED)
    found = ragged.run("triton", 16, list(range(100)), torch.bfloat16)
    assert found.dtype is torch.bfloat16
    np.testing.assert_allclose(found.float().numpy(), ragged.exact(), atol=0.05)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_directory(tiny.model(9), tmp_path_factory.mktemp("tiny"))


def config(**changes: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {"device": "cpu", "dtype": "float32", "attention": "triton", "block_size": 4, "blocks": 64, **changes}
    )


@pytest.mark.parametrize("recorded", [False, True], ids=["as it comes", "recorded"])
def test_under_the_engine_its_tokens_are_transformers(directory: Path, recorded: bool) -> None:
    """engine H3: chunks, mixed steps, beams and recomputes on the way; once more with decodes as replays of recorded
    steps, whose contexts grow over the ends of blocks."""
    prompts = [
        [(7 * i * i + 3 * start) % 290 + 3 for i in range(length)] for start, length in ((0, 9), (5, 14), (2, 6))
    ]
    cases = oracle.greedy(directory, prompts, 10)
    engine = config(blocks=14, max_chunk_tokens=5)
    model = load(directory, engine)
    replays = eager(model, most=2) if recorded else []
    bench = Bench("", engine, model)
    requests = [Generate(str(index), case.prompt, 10, GREEDY, scope=b"s") for index, case in enumerate(cases)]
    search = Generate("beams", prompts[0], 4, GREEDY, n=2, beams=Beams(2), scope=b"s")
    bench.run([*requests, search], stagger=1)
    for index, case in enumerate(cases):
        assert bench.done[str(index), 0].tokens[: len(case.expected)] == case.expected
    assert bench.preemptions > 0
    assert bool(replays) == recorded


def test_warming_up_leaves_an_empty_cache(directory: Path) -> None:
    runner = load(directory, config(blocks=2, block_size=1)).runner
    runner.warm_up()  # type: ignore[union-attr]
    assert not runner.cache.data.any()


def test_it_is_chosen_by_name() -> None:
    assert backend("triton", AttentionShape(4, 2, 16)).name == "triton"
