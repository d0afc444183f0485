"""The last layer goes on with the rows that sample only: they have the same bits as if all did, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.model import tiny
from tests.workers.model.native.by_hand import Kernel, ids, table

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3": {},
}


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.model(4, request.param, hidden_size=64, head_dim=16, **FAMILIES[request.param])
    return tiny.write_directory(made, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_whoever_else_samples(directory: Path, dtype: torch.dtype, kv_dtype: str) -> None:
    """A prompt, one that goes on, a decode and a single row that does not sample, in one step."""
    kernel = Kernel(directory, dtype, kv_dtype=kv_dtype)
    first, second, third, fourth = (ids(n, n) for n in (90, 40, 21, 18))
    tables = [list(range(10, 16)), list(range(40, 43)), list(range(43, 45)), list(range(45, 47))]
    for tokens, blocks in zip((second, third, fourth), tables[1:], strict=True):
        kernel.run((tokens[: len(tokens) // 2], 0, blocks))
    kernel.run((third[:-1], len(third) // 2, tables[2]))
    kernel.run((fourth[:-1], len(fourth) // 2, tables[3]))
    step = ((first, 0, tables[0]), (second, 20, tables[1]), (third, 20, tables[2]), (fourth, 17, tables[3]))
    every = kernel.run(*step)
    assert len(every) == 112
    for sampled in ([89], [89, 109, 110], [0, 1, 2, 40, 89, 95, 111], [111], list(range(112)), [5, 5, 3]):
        assert torch.equal(kernel.run(*step, sampled=sampled), every[sampled]), f"rows {sampled} sample"


def test_rows_that_do_not_sample_leave_their_keys_and_values(directory: Path) -> None:
    tokens, blocks = ids(60), list(range(4))
    whole, parts = Kernel(directory), Kernel(directory)
    want = whole.run((tokens, 0, blocks))
    for start, end in ((0, 7), (7, 8), (8, 40), (40, 59)):
        assert len(parts.run((tokens[:end], start, blocks), sampled=[])) == 0
    assert torch.equal(parts.cache.data[:, :3], whole.cache.data[:, :3])
    assert torch.equal(parts.run((tokens, 59, blocks))[0], want[-1])


def test_a_context_of_several_splits_ends_with_the_rows_that_sample(tmp_path: Path) -> None:
    made = tiny.model(5, max_position_embeddings=4096, hidden_size=64, head_dim=16)
    kernel, tokens, blocks = Kernel(tiny.write_directory(made, tmp_path)), ids(1500), table(1500, 1)
    kernel.run((tokens[:1000], 0, blocks), sampled=[])
    every = kernel.run((tokens, 1000, blocks))
    assert torch.equal(kernel.run((tokens, 1000, blocks), sampled=[23, 24, 499]), every[[23, 24, 499]])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return Kernel(tiny.write_directory(tiny.model(6, hidden_size=64, head_dim=16), tmp_path_factory.mktemp("model")))


@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=6), data=st.data())
def test_any_rows_of_any_step(kernel: Kernel, counts: list[int], data: st.DataObject) -> None:
    chunks = [(ids(n, n), 0, list(range(3 * i, 3 * i + 3))) for i, n in enumerate(counts)]
    rows = sum(counts)
    sampled = data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows).map(sorted))
    assert torch.equal(kernel.run(*chunks, sampled=sampled), kernel.run(*chunks)[sampled])
