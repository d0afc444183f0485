"""Our own engine, started and driven as the peers are."""

from __future__ import annotations

import json
import os
from typing import Any

from gateway.bench.engine import BenchEngine
from gateway.bench.engine import open_engine as open_bench
from gateway.bench.load import Request
from gateway.bench.peers.known import OVERRIDES
from gateway.bench.peers.wire import Settings
from gateway.bench.pump import News


class Forebay:
    """A ``wire.Driven``."""

    def __init__(self, engine: BenchEngine) -> None:
        self._engine = engine

    def submit(self, request: Request) -> None:
        """Greedy; end tokens do not stop it."""
        self._engine.submit(request)

    def step(self) -> list[News]:
        """One engine step."""
        return self._engine.step()

    def versions(self) -> dict[str, str]:
        """Ours and what computes."""
        names = ("forebay", "torch", "kernels", "dtype")
        found = self._engine.versions()
        return {name: str(found[name]) for name in names if name in found}


def open_engine(model: str, settings: Settings) -> Forebay:
    """Load, as a worker does. ``Settings`` go before the configuration's engine block."""
    from workers import heap
    from workers.config import EngineConfig

    values: dict[str, Any] = json.loads(os.environ.get(OVERRIDES, "{}"))
    size = EngineConfig.model_validate(values).block_size
    values |= {
        "blocks": -(-settings.kv_tokens // size),
        "max_running": settings.max_running,
        "max_context": settings.max_context,
        "dtype": settings.dtype,
        "threads": settings.threads,
        "prefix_cache": settings.prefix_cache,
    }
    if settings.max_step_tokens is not None:
        values["max_step_tokens"] = settings.max_step_tokens
    opened = Forebay(open_bench(model, EngineConfig.model_validate(values)))
    heap.settle()
    return opened
