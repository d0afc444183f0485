"""How many sequences may run at once: a fixed number, or what the KV cache holds of requests as they have been.

Rules
- ``auto`` is capacity ÷ mean length, rounded down: prompt + output of the sequences that ended last, in whole blocks.
  Before any has ended it reckons with ``ASSUMED`` of ``MEAN_REQUEST_TOKENS``, which fade as others come.
- At least 1, at most the rows of a step: more sequences could not each get their token in every step.
- Only sequences that ran to their end count. What is cancelled says nothing of how long answers are.
- A limit that falls below what runs takes nobody's slot away: it only lets nobody in.
"""

from __future__ import annotations

from collections import deque

from workers.config import MEAN_REQUEST_TOKENS, EngineConfig
from workers.engine.tables import Tables

REMEMBERED = 256
ASSUMED = 16


class Slots:
    """Of one engine. ``limit`` is the number that holds now; O(1) to read and to update."""

    def __init__(self, config: EngineConfig, blocks: int, tables: Tables | None = None) -> None:
        self._blocks, self._tables = blocks, tables or Tables(block_size=config.block_size)
        self._most = config.max_step_tokens
        self._auto = config.max_running == "auto"
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        """In blocks."""
        self._sum = 0
        if config.max_running == "auto":
            for _ in range(ASSUMED):
                self._add(MEAN_REQUEST_TOKENS)
            self.limit = self._fitting()
        else:
            self.limit = config.max_running

    def ended(self, tokens: int) -> None:
        """A sequence ran to its end with so many tokens, prompt and output."""
        if self._auto:
            self._add(tokens)
            self.limit = self._fitting()

    def _add(self, tokens: int) -> None:
        if len(self._lengths) == REMEMBERED:
            self._sum -= self._lengths[0]
        length = self._tables.worst(tokens)
        self._lengths.append(length)
        self._sum += length

    def _fitting(self) -> int:
        return max(1, min(self._blocks * len(self._lengths) // self._sum, self._most))
