"""Decode steps replayed as one recorded graph: on a GPU a small model's step otherwise waits for its kernels' launches.

Rules
- Recorded at start, one graph per bucket of rows, largest first so that all live in one memory pool; nothing is
  recorded later. Steps with prompt chunks, or with more rows than the largest bucket, run as they come.
- A graph reads and writes fixed addresses: before a replay the step's figures are copied there. Rows up to the bucket's
  size are padding: token 0 at position 0 of the scratch block, which no sequence has.
- The logits are the graph's own memory, valid until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.config import EngineConfig
from workers.model.attention import AttentionBackend
from workers.model.batch import Layout
from workers.model.kv_cache import KvCache
from workers.model.staging import ship

LARGEST = 256


def most_rows(engine: EngineConfig) -> int:
    """Rows of the largest graph that this engine needs."""
    running = engine.max_step_tokens if engine.max_running == "auto" else engine.max_running
    return min(LARGEST, engine.max_step_tokens, running)


class Steady(Protocol):
    """A backend's step of ``hold``: one row for each sequence, all addresses the same ever after."""

    def refill(self, tables: NDArray[np.int64], contexts: NDArray[np.int64]) -> None:
        """``tables`` [rows, blocks of the longest], ``contexts`` [rows]."""
        ...


class GraphBackend(AttentionBackend, Protocol):
    """A backend whose steps can be recorded."""

    def hold(self, rows: int, width: int, cache: KvCache) -> Steady:
        """A step of ``rows`` single-row sequences with up to ``width`` blocks each; ``attend`` takes it."""
        ...


Compute = Callable[[], Tensor]
Recorder = Callable[[Compute], tuple[Callable[[], None], Tensor]]
"""Records what a call launches; returns how to launch it again, and the tensor that then holds its result."""


class CudaRecorder:
    """CUDA graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, compute: Compute) -> tuple[Callable[[], None], Tensor]:
        """Run twice beside the stream (libraries set themselves up, kernels compile), then record."""
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(2):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


class DecodeGraphs:
    """The graphs of one decoder. ``most``: rows of the largest; ``longest``: tokens a sequence may have."""

    def __init__(
        self,
        decoder: Callable[..., Tensor],
        cache: KvCache,
        attention: GraphBackend,
        *,
        most: int,
        longest: int,
        recorder: Recorder,
    ) -> None:
        """Record all. The cache must have a scratch block."""
        self._cache, self._attention, self._decoder = cache, attention, decoder
        self.most = most
        self._width = -(-longest // cache.block_size)
        device = cache.data.device
        self._inputs = [torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3)]
        self._recorded: dict[int, tuple[Callable[[], None], Tensor, Steady]] = {}
        for rows in reversed(buckets(most)):
            self._recorded[rows] = self._record(rows, recorder)

    def _record(self, rows: int, recorder: Recorder) -> tuple[Callable[[], None], Tensor, Steady]:
        cache, attention = self._cache, self._attention
        step = attention.hold(rows, self._width, cache)
        tokens, positions, slots = (part[:rows] for part in self._inputs)
        every = torch.arange(rows, device=slots.device)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(layer, keys, values, slots)
            return attention.attend(layer, queries, keys, values, cache, step)

        slots.fill_(cache.blocks * cache.block_size)
        step.refill(np.full((rows, 1), cache.blocks), np.ones(rows, dtype=np.int64))
        replay, logits = recorder(lambda: self._decoder(tokens, positions, attend, every))
        return replay, logits, step

    def run(self, layout: Layout) -> Tensor | None:
        """fp32 logits [wanted rows, vocab], or None for a step that was not recorded."""
        count = len(layout.tokens)
        if not layout.decodes_only or count > len(self._inputs[0]):
            return None
        rows = next(size for size in sorted(self._recorded) if size >= count)
        replay, logits, step = self._recorded[rows]
        spare, cache = rows - count, self._cache
        scratch = cache.blocks * cache.block_size
        filled = ship(
            [
                np.pad(layout.tokens, (0, spare)),
                np.pad(layout.positions, (0, spare)),
                np.pad(layout.slots, (0, spare), constant_values=scratch),
            ],
            logits.device,
        )
        for target, source in zip(self._inputs, filled, strict=True):
            target[:rows].copy_(source)
        tables = np.zeros((rows, max(map(len, layout.blocks))), dtype=np.int64)
        for line, blocks in zip(tables, layout.blocks, strict=False):
            line[: len(blocks)] = blocks
        tables[count:, 0] = cache.blocks
        step.refill(tables, np.pad(np.array(layout.context_lens), (0, spare), constant_values=1))
        replay()
        if len(layout.logit_rows) == count:
            return logits[:count]
        return logits[torch.tensor(layout.logit_rows, dtype=torch.int64, device=logits.device)]


def buckets(most: int) -> list[int]:
    """1, 2, 4, 8, then every eighth number, up to ``most`` itself."""
    sizes = [size for size in (1, 2, 4, *range(8, most, 8)) if size < most]
    return [*sizes, most]
