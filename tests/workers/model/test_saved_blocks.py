"""``save`` and ``restore``: the same contract on both caches, so that tiers and connectors need to know neither."""

from __future__ import annotations

from typing import Protocol

import pytest
import torch

from workers.model.config import ModelConfig, RopeConfig
from workers.model.kv_cache import make_cache
from workers.model.native.decoder import NativeCache

BLOCKS, SIZE = 7, 16


class Cache(Protocol):
    data: torch.Tensor
    block_bytes: int
    bytes_per_token: int

    def save(self, blocks: list[int]) -> torch.Tensor: ...
    def restore(self, blocks: list[int], saved: torch.Tensor) -> None: ...
    def zero(self, blocks: list[int]) -> None: ...
    def copy(self, pairs: list[tuple[int, int]]) -> None: ...


def _make(kind: str, dtype: torch.dtype, kv_dtype: str = "auto") -> tuple[Cache, int]:
    """A cache full of numbers that differ from slot to slot, and the axis of its blocks."""
    config = ModelConfig("x", 10, 32, 32, 3, 2, 2, 16, 512, 1e-5, RopeConfig(), True)
    cache: Cache
    if kind == "torch":
        cpu = torch.device("cpu")
        cache, axis = make_cache(config, BLOCKS, SIZE, dtype, cpu, kv_dtype=kv_dtype, scratch=kv_dtype == "auto"), 2
    else:
        cache, axis = NativeCache(config, BLOCKS, SIZE, dtype, kv_dtype), 1
    raw = cache.data.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    return cache, axis


KINDS = [
    ("torch", torch.float32, "auto"),
    ("torch", torch.bfloat16, "auto"),
    ("torch", torch.bfloat16, "fp8"),
    ("native", torch.bfloat16, "auto"),
    ("native", torch.bfloat16, "int8"),
    ("native", torch.float32, "fp8"),
]


@pytest.fixture(params=KINDS, ids=str)
def made(request: pytest.FixtureRequest) -> tuple[Cache, int]:
    return _make(*request.param)


def test_what_was_saved_comes_back_bit_for_bit_into_other_blocks(made: tuple[Cache, int]) -> None:
    cache, axis = made
    before = cache.data.view(torch.uint8).clone()
    saved = cache.save([5, 0, 3])
    assert (saved.dtype, saved.device.type, saved.shape) == (torch.uint8, "cpu", (3, cache.block_bytes))
    assert cache.block_bytes == cache.bytes_per_token * SIZE
    cache.zero([5, 0, 3])
    cache.restore([1, 6, 5], saved)
    after = cache.data.view(torch.uint8)
    for source, target in ((5, 1), (0, 6), (3, 5)):
        assert torch.equal(after.select(axis, target), before.select(axis, source))
    for untouched in (2, 4):
        assert torch.equal(after.select(axis, untouched), before.select(axis, untouched))
    assert not after.select(axis, 0).any()
    assert not after.select(axis, 3).any()


def test_saved_bytes_are_a_copy(made: tuple[Cache, int]) -> None:
    cache, _ = made
    saved = cache.save([2])
    kept = saved.clone()
    cache.zero([2])
    assert torch.equal(saved, kept)
    assert kept.any()


def test_rows_of_a_larger_buffer_are_taken(made: tuple[Cache, int]) -> None:
    cache, axis = made
    before = cache.data.view(torch.uint8).clone()
    store = torch.zeros(9, cache.block_bytes, dtype=torch.uint8)
    store[4:6] = cache.save([1, 2])
    cache.restore([0, 3], store[4:6])
    assert torch.equal(cache.data.view(torch.uint8).select(axis, 3), before.select(axis, 2))


def test_none_at_all(made: tuple[Cache, int]) -> None:
    cache, _ = made
    before = cache.data.view(torch.uint8).clone()
    saved = cache.save([])
    assert saved.shape == (0, cache.block_bytes)
    cache.restore([], saved)
    assert torch.equal(cache.data.view(torch.uint8), before)


def test_bytes_of_another_cache_are_refused(made: tuple[Cache, int]) -> None:
    cache, _ = made
    saved = cache.save([0, 1])
    for wrong in (saved[:1], saved[:, :-2], saved.view(torch.int8), saved.flatten()):
        with pytest.raises(ValueError, match=rf"must be torch\.uint8 \[2, {cache.block_bytes}\]"):
            cache.restore([2, 3], wrong)
