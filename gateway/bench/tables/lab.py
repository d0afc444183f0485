"""What the tables share: how large they are, and engines with other settings than the configuration's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.bench.display import Display
from gateway.bench.engine import BenchEngine, open_engine
from gateway.bench.load import Load, Timeline
from gateway.bench.target import Target


@dataclass(frozen=True, slots=True)
class Sizes:
    """The published tables' figures; ``QUICK`` and the tests take smaller ones."""

    # 1: one answer with and without keys and values kept
    answer: tuple[int, int] = (16, 48)
    repeats: int = 3
    # 2: many requests at once
    requests: int = 1000
    inputs: tuple[int, int] = (8, 32)
    outputs: tuple[int, int] = (16, 96)
    slots: int = 16
    # 3: a stream and long prompts
    stream: tuple[int, int] = (32, 300)
    stream_at: int = 32
    long_prompts: int = 3
    long_prompt: int = 3500
    chunks: tuple[int, ...] = (512, 1024, 2048, 8192)
    # 4: a common prefix, and nothing in common
    prefix: int = 3000
    prefix_own: int = 32
    prefix_later: int = 4
    distinct: tuple[int, int, int] = (2048, 16, 32)
    """Input, output, at once."""
    distinct_rounds: int = 3
    # 5: a small pool
    pool_tokens: int = 22_048
    pressure: tuple[tuple[int, int, int], ...] = (
        (512, 128, 1),
        (512, 128, 8),
        (512, 128, 32),
        (512, 128, 64),
        (2048, 128, 32),
        (1500, 256, 64),
    )
    """Input, output, under way."""
    # 6: what the cache's memory holds
    memory_requests: int = 400
    memory_inputs: tuple[int, int] = (16, 512)
    memory_outputs: tuple[int, int] = (16, 256)
    memory_running: int = 64
    reserved: int = 2048
    """Tokens per request where the greatest length is reserved."""
    block_sizes: tuple[int, ...] = (8, 16, 32, 64)
    widths: tuple[int, ...] = (2, 4, 6)
    """Parallel samples and beams."""
    shared: tuple[int, int] = (512, 128)
    """Prompt and answer of the parallel samples."""
    beam: tuple[int, int] = (256, 48)
    """Prompt and answer of the beam search."""


QUICK = Sizes(
    repeats=1,
    requests=48,
    stream=(32, 80),
    long_prompt=800,
    chunks=(256, 1024),
    prefix=600,
    prefix_later=2,
    distinct=(256, 8, 8),
    distinct_rounds=1,
    pool_tokens=2048,
    pressure=((128, 32, 1), (128, 32, 8), (128, 32, 16), (512, 32, 8)),
    memory_requests=100,
    beam=(64, 12),
)
"""A few minutes instead of an hour: to see that everything runs, not to publish."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Makes engines for the tables. Prompts' labels carry ``seed``."""

    target: Target
    display: Display
    seed: int = 0
    engines: set[str] = field(default_factory=set)
    """Device, dtype and kernels of every engine made."""

    @contextmanager
    def engine(self, **changes: Any) -> Iterator[BenchEngine]:
        """An engine with other settings; ended afterwards. Raises BenchError."""
        config = self.target.engine.model_validate({**self.target.engine.model_dump(), **changes})
        made = open_engine(self.target.source, config, base_dir=self.target.base_dir)
        self.engines.add(f"{made.loaded.device}, {made.loaded.dtype}, {made.loaded.attention}")
        try:
            yield made
        finally:
            made.close()

    def run(self, engine: BenchEngine, title: str, work: Load) -> list[Timeline]:
        """Run a load with its progress shown. Raises BenchError."""
        with self.display.task(title) as tick:
            return engine.run(work, tick)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens, at least 2."""
        return max(2, tokens // self.target.engine.block_size)
