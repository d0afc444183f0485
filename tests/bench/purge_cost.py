"""What a purge costs: ``python -m tests.bench.purge_cost [BLOCKS]``.

Milliseconds to find and to zero BLOCKS (10,000) cached blocks of 16 tokens of a model of SmolLM2-135M's shape in
bfloat16, by scope and by label, twice each. Nothing is asserted: the figures depend on the machine.
"""

from __future__ import annotations

import random
import sys
import time
from types import SimpleNamespace
from typing import cast

import torch

from workers.engine.block_hash import BlockKey
from workers.engine.block_pool import BlockPool
from workers.model.config import ModelConfig
from workers.model.kv_cache import KvCache

SHAPE = SimpleNamespace(layers=30, kv_heads=3, head_dim=64)


def fill(pool: BlockPool, count: int) -> None:
    """Cache ``count`` blocks of one scope and label, in no order."""
    blocks = [pool.take(b"scope", "tenant", 1.0) for _ in range(count)]
    random.Random(0).shuffle(blocks)
    pool.mark(blocks, frozenset({b"label"}))
    for block in blocks:
        pool.publish(block, BlockKey(block.to_bytes(32, "big")))
    pool.release(blocks)


def say(text: str) -> None:
    """A line of the result."""
    sys.stdout.write(f"{text}\n")


def main(count: int) -> None:
    """Print the figures."""
    cache = KvCache(cast(ModelConfig, SHAPE), count, 16, torch.bfloat16, torch.device("cpu"))
    cache.data.fill_(1)
    pool = BlockPool(count)
    size = cache.data.numel() * 2 / 2**30
    say(f"{count} blocks, {size:.2f} GiB, {torch.get_num_threads()} threads")
    for scopes, labels in (([b"scope"], []), ([], [b"label"])) * 2:
        fill(pool, count)
        cache.data.fill_(1)
        began = time.perf_counter()
        found, _ = pool.purge(scopes, labels)
        dirty = pool.take_dirty()
        between = time.perf_counter()
        cache.zero(dirty)
        ended = time.perf_counter()
        assert found == len(dirty) == count
        assert not cache.data.any()
        what = "scope" if scopes else "label"
        say(f"by {what}: found in {(between - began) * 1e3:.0f} ms, zeroed in {(ended - between) * 1e3:.0f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
