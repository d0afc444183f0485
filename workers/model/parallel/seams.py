"""Blocks of a divided cache as bytes of an undivided one: what is saved fits wherever the model runs, however divided.

A block's bytes are ``[layers, 2, block_size, row]``; a row is a token's keys, or values, of all heads in one layer, and
in a quantised cache the heads' scales behind them (``kv_format``). Stages have some of the layers, lanes some of the
heads: a row's fields are cut one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.config import KV_SCALE_BYTES
from workers.model.config import ModelConfig
from workers.model.kv_cache import KvCache, QuantisedKvCache
from workers.model.parallel.split import span


@dataclass(frozen=True, slots=True)
class Seams:
    """Where the parts of a block meet. ``fields``: bytes of a lane's row, one number per field."""

    layers: int
    width: int
    stages: int
    block_size: int
    fields: tuple[int, ...]

    @staticmethod
    def of(cache: KvCache, part: ModelConfig, layers: int, width: int, stages: int) -> Seams:
        """``cache``: one rank's, of the model ``part``. ``layers``: of the whole model."""
        row = cache.block_bytes // (part.layers * 2 * cache.block_size)
        scales = KV_SCALE_BYTES * part.kv_heads if isinstance(cache, QuantisedKvCache) else 0
        return Seams(layers, width, stages, cache.block_size, (row - scales, scales) if scales else (row,))

    @property
    def block_bytes(self) -> int:
        """Of a whole block."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each rank's part of a block."""
        per_layer = 2 * self.block_size * sum(self.fields)
        return [len(run) * per_layer for run in self._runs for _ in range(self.width)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Every rank's uint8 [blocks, its size], in their order → uint8 [blocks, block_bytes]."""
        blocks = len(parts[0])
        stages = []
        for stage, run in enumerate(self._runs):
            lanes = [
                part.view(blocks, len(run), 2, self.block_size, -1)
                for part in parts[stage * self.width : (stage + 1) * self.width]
            ]
            pieces = [torch.split(lane, list(self.fields), dim=-1) for lane in lanes]
            stages.append(torch.cat([piece for field in zip(*pieces, strict=True) for piece in field], dim=-1))
        return torch.cat(stages, dim=1).flatten(1)

    def cut(self, saved: Tensor) -> list[Tensor]:
        """uint8 [blocks, block_bytes] → every rank's, contiguous."""
        rows = saved.view(len(saved), self.layers, 2, self.block_size, -1)
        pieces = torch.split(rows, [field for field in self.fields for _ in range(self.width)], dim=-1)
        return [
            torch.cat([piece[:, run.start : run.stop] for piece in pieces[lane :: self.width]], dim=-1).flatten(1)
            for run in self._runs
            for lane in range(self.width)
        ]

    @property
    def _runs(self) -> list[range]:
        return [span(self.layers, stage, self.stages) for stage in range(self.stages)]
