"""Bytes of whole blocks, out of a cache and into it, and what tells one cache's bytes from another's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from hashlib import sha256

import torch

from workers.config import EngineConfig
from workers.model.draft import DraftRunner
from workers.model.kv_cache import KvCache
from workers.model.native.decoder import NativeCache

LOSSY = ("kv_dtype", "weight_dtype")
"""Settings that change what a model's keys and values are."""
MOST_BYTES = 32 * 2**20
"""Of one block: half of what a message of gRPC may have here."""


class CacheMover:
    """Of one model's cache. A ``workers.engine.leases.BlockMover``."""

    def __init__(
        self, cache: KvCache | NativeCache, written: Callable[[list[int]], None] = lambda blocks: None
    ) -> None:
        """``written``: is told of blocks whose content is another now."""
        self._cache, self._written = cache, written
        self.block_bytes = cache.block_bytes
        self.kind = f"{type(cache).__name__} {cache.data.dtype}"

    @torch.inference_mode()
    def read(self, blocks: list[int]) -> bytes:
        """A copy of the blocks, one after the other."""
        return self._cache.save(blocks).numpy().tobytes()

    @torch.inference_mode()
    def write(self, blocks: list[int], data: bytes) -> None:
        """Put back what ``read`` gave. Raises ValueError for another length."""
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if rows.numel() != len(blocks) * self.block_bytes:
            raise ValueError(f"{rows.numel()} bytes are not {len(blocks)} blocks of {self.block_bytes}")
        self._cache.restore(blocks, rows.view(len(blocks), self.block_bytes))
        self._written(blocks)


def mover_of(runner: object) -> CacheMover:
    """For the cache that a runner's larger model has; a draft model forgets what it knew of blocks that are written.

    Raises ValueError for a runner that has no cache of its own.
    """
    drafts = runner if isinstance(runner, DraftRunner) else None
    runner = drafts.runner if drafts is not None else runner
    cache = getattr(runner, "cache", None)
    if not isinstance(cache, KvCache | NativeCache):
        raise ValueError("engine.role: this model's keys and values do not lie in one cache; write role: both")
    if cache.block_bytes > MOST_BYTES:
        raise ValueError(
            f"engine.role: a block of {cache.block_size} tokens has {cache.block_bytes} bytes, and at most "
            f"{MOST_BYTES} can be sent at once; lower engine.block_size"
        )
    return CacheMover(cache) if drafts is None else CacheMover(cache, drafts.forget)


def layout_of(mover: CacheMover, revision: str, dtype: str, engine: EngineConfig) -> str:
    """A digest of all that blocks' bytes depend on beside their keys. Equal: they may change places.

    ``dtype``: what the model computes in.
    """
    about = {
        "revision": revision,
        "cache": mover.kind,
        "block_size": engine.block_size,
        "block_bytes": mover.block_bytes,
        "byteorder": sys.byteorder,
        **{name: str(getattr(engine, name)) for name in LOSSY},
        "dtype": dtype,
    }
    return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
