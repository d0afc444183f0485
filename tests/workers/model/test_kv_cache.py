"""The paged tensor: sizes, writes, copies, zeros."""

from __future__ import annotations

import pytest
import torch

from tests.workers.model.test_attention import CPU, cache_for
from workers.config import EngineConfig, kv_bytes_per_token
from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence
from workers.model.batch import build
from workers.model.kv_cache import KvCacheSizeError, block_count
from workers.protocol import SamplingParams


def test_bytes_per_token() -> None:
    assert kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128, bytes=2) == 131_072
    assert 4096 * kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128, bytes=2) == 512 * 2**20
    cache = cache_for(3, 4, 8)
    assert cache.bytes_per_token * 4 * 8 == cache.data.nbytes


def test_blocks_follow_from_bytes() -> None:
    assert block_count(EngineConfig(kv_cache=2**20, block_size=16), 1000) == 2**20 // 16000
    assert block_count(EngineConfig(kv_cache=1, blocks=7), 1000) == 7
    with pytest.raises(KvCacheSizeError, match=r"engine\.kv_cache=20000 bytes holds 1 blocks .* give it 32000 bytes"):
        block_count(EngineConfig(kv_cache=20000, block_size=16), 1000)


def test_a_cache_that_does_not_fit_says_what_to_lower() -> None:
    with pytest.raises(KvCacheSizeError, match=r"engine\.kv_cache: .* do not fit on cpu; lower it"):
        cache_for(4, 2**45, 16)


def test_write_copy_zero() -> None:
    cache = cache_for(2, 6, 4)
    slots = torch.tensor([4, 5, 23])
    keys, values = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    cache.write(0, keys, values, slots)
    assert torch.equal(cache.data[0, 0, 1, :2], keys[:2])
    assert torch.equal(cache.data[0, 1, 5, 3], values[2])
    assert int((cache.data != 0).sum()) == keys.numel() * 2
    before = cache.data.clone()
    cache.copy([(1, 0), (5, 1)])  # block 1 is read before it is overwritten
    assert torch.equal(cache.data[:, :, 0], before[:, :, 1])
    assert torch.equal(cache.data[:, :, 1], before[:, :, 5])
    cache.zero([0, 5])
    assert not cache.data[:, :, [0, 5]].any()
    assert torch.equal(cache.data[:, :, 1], before[:, :, 5])
    cache.zero([])
    cache.copy([])


def test_rows_are_laid_out_in_plan_order_without_padding() -> None:
    first = Sequence("a", 0, [7, 8, 9, 10, 11], 4, 9, SamplingParams(), blocks=[3, 1])
    second = Sequence("b", 0, [20, 21, 22, 23, 24, 25, 26], 7, 9, SamplingParams(), blocks=[2, 5])
    third = Sequence("b", 1, list(second.tokens), 7, 9, SamplingParams(), blocks=[2, 5])
    batch = build([Chunk(first, 4, 1, (first,)), Chunk(second, 2, 5, (second, third))], 4, CPU)
    assert batch.tokens.tolist() == [11, 22, 23, 24, 25, 26]
    assert batch.positions.tolist() == [4, 2, 3, 4, 5, 6]
    assert batch.slots.tolist() == [4, 10, 11, 20, 21, 22]
    assert (batch.query_lens, batch.starts, batch.context_lens) == ([1, 5], [0, 1], [5, 7])
    assert batch.rows.tolist() == [0, 5]
    assert (batch.layout.logit_rows, batch.layout.sampler_rows) == ([0, 5], [0, 1, 1])
    assert batch.layout.samplers == [first, second, third]
    assert not batch.layout.decodes_only
    assert batch.token_slots(1, 5).tolist() == [8, 9, 10, 11, 20]


@pytest.mark.parametrize(("start", "count"), [(0, 6), (4, 2), (0, 0)])
def test_a_plan_that_does_not_fit_is_refused(start: int, count: int) -> None:
    one = Sequence("a", 0, [7, 8, 9, 10, 11], 4, 9, SamplingParams(), blocks=[3])
    with pytest.raises(ValueError, match="does not fit sequence 'a': 5 tokens, 1 blocks of 4"):
        build([Chunk(one, start, count)], 4, CPU)
