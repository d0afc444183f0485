"""Which steps are replayed, with what in them. With real kernels: ``interpreted.py`` and ``make test-gpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence
from workers.model.batch import lay_out
from workers.model.config import ModelConfig, RopeConfig
from workers.model.graphs import DecodeGraphs, buckets
from workers.model.kv_cache import KvCache
from workers.protocol import SamplingParams

CPU = torch.device("cpu")
CONFIG = ModelConfig("x", 10, 8, 8, 1, 2, 2, 4, 512, 1e-5, RopeConfig(), True)


class Step:
    """What was filled in last."""

    tables: np.ndarray
    contexts: np.ndarray

    def refill(self, tables: np.ndarray, contexts: np.ndarray) -> None:
        self.tables, self.contexts = tables, contexts


class Backend:
    name = "noting"

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}

    def hold(self, rows: int, width: int, cache: KvCache) -> Step:
        self.steps[rows] = Step()
        return self.steps[rows]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: KvCache, step: Any) -> Tensor:
        return queries


def decoder(tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor], rows: Tensor) -> Tensor:
    """Writes each row's token into the cache; its logits are token and position."""
    lines = tokens[:, None, None].float().expand(-1, 2, 4)
    attend(0, lines, lines, lines)
    return torch.stack([tokens, positions], dim=1)[rows].float()


def record(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    result = compute()

    def replay() -> None:
        result.copy_(compute())

    return replay, result


def made(most: int = 4) -> tuple[DecodeGraphs, Backend, KvCache]:
    cache, backend = KvCache(CONFIG, 8, 4, torch.float32, CPU, scratch=True), Backend()
    graphs = DecodeGraphs(decoder, cache, backend, most=most, longest=20, recorder=record)  # type: ignore[arg-type]
    return graphs, backend, cache


def decode(token: int, position: int, blocks: list[int]) -> Chunk:
    one = Sequence("s", 0, [0] * position + [token], position, 4, SamplingParams(), blocks=blocks)
    return Chunk(one, position, 1, (one,))


def test_buckets() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert buckets(256)[-3:] == [240, 248, 256]


def test_rows_up_to_the_bucket_go_to_the_scratch_block() -> None:
    graphs, backend, cache = made()
    chunks = [decode(7, 5, [3, 1]), decode(8, 2, [0]), decode(9, 9, [2, 4, 6])]
    logits = graphs.run(lay_out(chunks, 4))
    assert logits is not None
    assert logits.tolist() == [[7, 5], [8, 2], [9, 9]]
    step = backend.steps[4]
    assert step.tables.tolist() == [[3, 1, 0], [0, 0, 0], [2, 4, 6], [8, 0, 0]]
    assert step.contexts.tolist() == [6, 3, 10, 1]
    keys = cache.data[0, 0, :, :, 0, 0]
    assert {(block, slot): float(keys[block, slot]) for block, slot in keys.nonzero().tolist()} == {
        (1, 1): 7.0,
        (0, 2): 8.0,
        (6, 1): 9.0,
    }, "padding is token 0 and lies in block 8"


def test_a_smaller_step_leaves_nothing_of_a_larger_one() -> None:
    graphs, backend, _ = made()
    graphs.run(lay_out([decode(token, token, [0, 1]) for token in range(1, 5)], 4))
    logits = graphs.run(lay_out([decode(5, 6, [2, 3]), decode(6, 1, [4]), decode(7, 0, [5])], 4))
    assert logits is not None
    assert logits.tolist() == [[5, 6], [6, 1], [7, 0]]
    assert backend.steps[4].contexts.tolist() == [7, 2, 1, 1]


def test_prompts_and_larger_steps_run_as_they_come() -> None:
    graphs, _, _ = made()
    one = Sequence("s", 0, [1, 2, 3], 3, 4, SamplingParams(), blocks=[0])
    assert graphs.run(lay_out([decode(7, 5, [3, 1]), Chunk(one, 0, 2)], 4)) is None
    assert graphs.run(lay_out([decode(7, 5, [3, 1])] * 5, 4)) is None


def test_only_wanted_rows_come_back() -> None:
    graphs, _, _ = made()
    silent = Sequence("s", 0, [1, 2, 3], 3, 4, SamplingParams(), blocks=[0])
    logits = graphs.run(lay_out([Chunk(silent, 1, 1), decode(9, 4, [2, 3])], 4))
    assert logits is not None
    assert logits.tolist() == [[9, 4]]


@pytest.mark.parametrize("scratch", [False, True])
def test_the_scratch_block_is_no_block_of_the_pool(scratch: bool) -> None:
    cache = KvCache(CONFIG, 8, 4, torch.float32, CPU, scratch=scratch)
    assert (cache.blocks, cache.data.shape[2]) == (8, 8 + scratch)
