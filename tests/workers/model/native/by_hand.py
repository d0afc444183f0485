"""A kernel whose chunks are laid out by hand. Without transformers: tests run it in processes of its own, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workers.model.config import read_config
from workers.model.native.decoder import NativeCache, NativeDecoder, Rows
from workers.model.weights import SafetensorsSource, Weights

BLOCK = 16


class Kernel:
    """A kernel over one model directory; lays out chunks by hand."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype = torch.float32,
        threads: int = 2,
        block: int = BLOCK,
        blocks: int = 160,
        kv_dtype: str = "auto",
        folds: bool = True,
    ) -> None:
        config = read_config(directory)
        self.cache = NativeCache(config, blocks, block, dtype, kv_dtype)
        self.block = block
        with SafetensorsSource(directory) as source, torch.inference_mode():
            weights = Weights(source, dtype, torch.device("cpu"))
            self.decoder = NativeDecoder(config, weights, 4096, self.cache, dtype, threads, folds=folds)

    def run(self, *chunks: tuple[list[int], int, list[int]], sampled: list[int] | None = None) -> Tensor:
        """Logits of all rows of chunks (known tokens, first position computed, block table), or of ``sampled`` ones."""
        rows = Rows()
        for tokens, start, table in chunks:
            rows.first.append(len(rows.tokens))
            rows.count.append(len(tokens) - start)
            rows.table.append(len(rows.blocks))
            rows.blocks.extend(table)
            for position in range(start, len(tokens)):
                rows.tokens.append(tokens[position])
                rows.positions.append(position)
                rows.slots.append(table[position // self.block] * self.block + position % self.block)
        rows.sample_rows.extend(range(len(rows.tokens)) if sampled is None else sampled)
        logits, best = self.decoder.forward(rows)
        fine = logits.isfinite().all(-1)
        assert torch.tensor(list(best))[fine].tolist() == logits.argmax(-1)[fine].tolist()
        return logits.clone()


def table(tokens: int, seed: int, block: int = BLOCK, blocks: int = 160) -> list[int]:
    """Blocks for so many tokens, in no order."""
    return np.random.default_rng(seed).permutation(blocks)[: -(-tokens // block)].tolist()


BROKEN_KEYS = ([5], [*range(64)], [66])
"""One of many, a whole group that is seen before any other, one that a group's last rows see only."""


def broken(directory: Path, dtype: torch.dtype, positions: list[int]) -> Tensor:
    """Logits of the 70th row when the first number of some of its keys is NaN in every layer, and no value is."""
    kernel, tokens, blocks = Kernel(directory, dtype), ids(70), table(70, 1)
    kernel.run((tokens[:69], 0, blocks))
    for position in positions:  # keys lie as [number / k][token][k] (kept.h), two numbers of bfloat16 side by side
        at = position % BLOCK * (4 // dtype.itemsize)
        kernel.cache.data[:, blocks[position // BLOCK], at] = float("nan")
    return kernel.run((tokens, 69, blocks))[0]


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def answer(kernel: Kernel) -> bytes:
    """The bits of the logits of a prompt in two chunks, of another beside its second, and of a decode."""
    tokens, blocks = ids(40), [5, 9, 2]
    first = kernel.run((tokens[:25], 0, blocks))
    second = kernel.run((tokens, 25, blocks), (ids(30, 4), 0, [20, 30]))
    last = kernel.run((tokens, 39, blocks))
    return torch.cat([first, second, last]).numpy().tobytes()
