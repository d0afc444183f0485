"""Attention backends: against a formula written out in numpy, against each other, and what must not matter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.workers.model.places import places
from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence
from workers.model.attention import Attend, AttentionShape, backend
from workers.model.batch import build
from workers.model.config import ModelConfig, RopeConfig
from workers.model.kv_cache import KvCache
from workers.protocol import SamplingParams

CPU = torch.device("cpu")
HEAD_DIM = 16
SHAPES = [(4, 4), (6, 2), (12, 2), (9, 3), (5, 1)]
"""(query heads, key heads); 12 over 2 is a group of 6, 9 over 3 of 3: no powers of two."""


def cache_for(
    kv_heads: int, blocks: int, block_size: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> KvCache:
    config = ModelConfig("x", 10, 8, 8, 1, kv_heads, kv_heads, HEAD_DIM, 512, 1e-5, RopeConfig(), True)
    return KvCache(config, blocks, block_size, dtype, device)


@dataclass(slots=True)
class Ragged:
    """Sequences with random keys and values, the last ``counts[i]`` tokens of each being this step's."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    counts: list[int]

    @classmethod
    def make(cls, seed: int, heads: int, kv_heads: int, shapes: list[tuple[int, int]]) -> Ragged:
        """``shapes``: (context, rows) of each sequence."""
        random = torch.Generator().manual_seed(seed)

        def tensor(*size: int) -> torch.Tensor:
            return torch.randn(*size, HEAD_DIM, generator=random)

        return cls(
            [tensor(context, kv_heads) for context, _ in shapes],
            [tensor(context, kv_heads) for context, _ in shapes],
            [tensor(rows, heads) for _, rows in shapes],
            [rows for _, rows in shapes],
        )

    def run(
        self,
        name: str,
        block_size: int,
        blocks: list[int],
        dtype: torch.dtype = torch.float32,
        fill: float = math.nan,
        device: torch.device = CPU,
    ) -> torch.Tensor:
        """Attention output [rows, heads * head_dim] on backend ``name``, with pages taken from ``blocks`` in order.

        Every slot that no sequence owns holds ``fill``.
        """
        heads, kv_heads = self.queries[0].shape[1], self.keys[0].shape[1]
        cache = cache_for(kv_heads, max(blocks) + 1, block_size, dtype, device)
        cache.data.fill_(fill)
        free, chunks = iter(blocks), []
        for keys, values, count in zip(self.keys, self.values, self.counts, strict=True):
            context = len(keys)
            one = Sequence("s", 0, [0] * context, context, 1, SamplingParams())
            one.blocks = [next(free) for _ in range(-(-context // block_size))]
            chunks.append(Chunk(one, context - count, count))
            if context > count:
                earlier = build([Chunk(one, 0, context - count)], block_size, device)
                past = (part[: context - count].to(device, dtype) for part in (keys, values))
                cache.write(0, *past, earlier.slots)
        shape = AttentionShape(heads, kv_heads, HEAD_DIM, dtype)
        attend = Attend(backend(name, shape, device), cache, build(chunks, block_size, device))
        new = [
            torch.cat([part[len(part) - count :] for part, count in zip(parts, self.counts, strict=True)])
            for parts in (self.queries, self.keys, self.values)
        ]
        return attend(0, *(part.to(device, dtype) for part in new)).cpu()

    def exact(self) -> np.ndarray:
        """The formula, number by number, in double precision."""
        rows = []
        for keys, values, queries in zip(self.keys, self.values, self.queries, strict=True):
            k, v, q = (part.double().numpy() for part in (keys, values, queries))
            group = q.shape[1] // k.shape[1]
            for row in range(len(q)):
                seen = len(k) - len(q) + row + 1
                line = []
                for head in range(q.shape[1]):
                    scores = k[:seen, head // group] @ q[row, head] / math.sqrt(HEAD_DIM)
                    weights = np.exp(scores - scores.max())
                    line.append(weights @ v[:seen, head // group] / weights.sum())
                rows.append(np.concatenate(line))
        return np.stack(rows)


MIXED = [(1, 1), (5, 1), (16, 1), (17, 1), (70, 1), (130, 1), (3, 3), (16, 16), (33, 9), (20, 2), (64, 5), (9, 1)]


@pytest.mark.parametrize(("name", "device"), places("reference", "batched"))
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_against_the_formula(name: str, device: str, heads: int, kv_heads: int, block_size: int) -> None:
    """engine H7 and A11: any group size; decodes, prompts, hits and misses in one batch; foreign slots hold NaN."""
    ragged = Ragged.make(1, heads, kv_heads, MIXED)
    found = ragged.run(name, block_size, list(range(500)), device=torch.device(device))
    np.testing.assert_allclose(found.numpy(), ragged.exact(), atol=2e-5)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_agree(seed: int) -> None:
    random = np.random.default_rng(seed)
    contexts = random.integers(1, 90, size=int(random.integers(1, 12)))
    shapes = [(int(context), int(random.integers(1, context + 1)) if random.random() < 0.5 else 1)
              for context in contexts]  # fmt: skip
    ragged = Ragged.make(seed, *SHAPES[seed % len(SHAPES)], shapes)
    blocks = random.permutation(700).tolist()
    plain = ragged.run("reference", 4, blocks)
    torch.testing.assert_close(ragged.run("batched", 4, blocks), plain, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("name", "device"), places("reference", "batched"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_placement_does_not_matter(name: str, device: str, dtype: torch.dtype) -> None:
    """engine H5: the same sequences on other pages, and beside other garbage, bit-equal."""
    ragged = Ragged.make(3, 9, 3, MIXED)
    place = torch.device(device)
    first = ragged.run(name, 16, list(range(100)), dtype, device=place)
    scattered = np.random.default_rng(0).permutation(100).tolist()
    assert torch.equal(first, ragged.run(name, 16, scattered, dtype, fill=1e4, device=place))
    assert not first.isnan().any()


def test_the_last_slot_of_the_pool_is_like_any_other() -> None:
    """engine H1: a full last block, in a batch whose other members are shorter."""
    ragged = Ragged.make(4, 6, 2, [(3, 1), (16, 1), (9, 4)])
    found = ragged.run("batched", 8, [0, 6, 7, 1, 2])
    np.testing.assert_allclose(found.numpy(), ragged.exact(), atol=2e-5)


@pytest.mark.parametrize("name", ["reference", "batched"])
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    ragged = Ragged.make(5, 9, 3, MIXED)
    together = ragged.run(name, 4, list(range(200)))
    row = 0
    for index, count in enumerate(ragged.counts):
        lone = Ragged([ragged.keys[index]], [ragged.values[index]], [ragged.queries[index]], [count])
        found = lone.run(name, 4, list(range(200)))
        torch.testing.assert_close(found, together[row : row + count], atol=2e-6, rtol=0)
        row += count


def test_bfloat16_stays_near_fp32() -> None:
    ragged = Ragged.make(6, 9, 3, MIXED)
    found = ragged.run("batched", 16, list(range(100)), torch.bfloat16)
    assert found.dtype is torch.bfloat16
    np.testing.assert_allclose(found.float().numpy(), ragged.exact(), atol=0.05)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"engine\.attention='flash' is not one of auto, flashinfer, triton, batched, reference"
    ):
        backend("flash", AttentionShape(4, 2, 8))
