"""What a backend is, and how one is found.

A backend sees the step twice: ``prepare`` once, where it derives what all layers share (gather indexes, masks, block
tables in its own form), and ``attend`` once per layer. A native kernel over block tables fits the same two calls.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from workers.model.batch import Batch
from workers.model.config import ModelConfig
from workers.model.kv_cache import KvCache
from workers.model.kv_tables import KvTables


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What does not change while the worker lives."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    kv_dtype: str = "auto"
    """``engine.kv_dtype``."""
    query_scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    score_cap: float = 0.0
    """Scores are bent to ±cap by tanh; 0 = not."""
    windowed: bool = False
    """Some layer attends to so many latest tokens only: ``prepare`` is told how many."""

    @classmethod
    def of(cls, config: ModelConfig, tables: KvTables, dtype: torch.dtype, kv_dtype: str = "auto") -> AttentionShape:
        """A model's."""
        return cls(
            config.heads,
            config.kv_heads,
            config.head_dim,
            dtype,
            kv_dtype,
            query_scale=config.query_scale,
            score_cap=config.score_cap,
            windowed=any(tables.windows),
        )

    @property
    def unusual(self) -> str | None:
        """What of it only the torch backends and the native kernel compute, or None."""
        if self.windowed:
            return "sliding windows"
        return "soft caps" if self.score_cap else None

    @property
    def group(self) -> int:
        """Query heads that share one key head; query head h reads key head h // group. Any whole number."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """By which scores are multiplied."""
        return float(self.head_dim**-0.5) if self.query_scale is None else self.query_scale


def as_computed_only(shape: AttentionShape) -> str | None:
    """Why a kernel that reads the cache's pages by itself cannot run on quantised ones; None where they are not."""
    return None if shape.kv_dtype == "auto" else f"kv_dtype={shape.kv_dtype} is read by native, batched and reference"


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over the paged cache."""

    name: str

    def __init__(self, shape: AttentionShape) -> None: ...

    def prepare(self, batch: Batch, window: int = 0) -> Any:
        """Whatever ``attend`` needs of this step, on the engine thread; once for each block table, of this window.

        A backend that refuses windows (``unsupported``) is never given one.
        """
        ...

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: KvCache, step: Any) -> Tensor:
        """Attention output [rows, heads * head_dim] in the dtype of ``queries`` [rows, heads, head_dim].

        ``keys`` and ``values`` [rows, kv_heads, head_dim] are this step's own and are already in ``cache``. A row of
        sequence s at position p attends to the tokens 0..p of s (with a window w: p - w + 1..p), and to nothing else.
        """
        ...


class Attend:
    """One step's attention as a decoder layer sees it: write this layer's keys and values, then attend."""

    __slots__ = ("_backend", "_cache", "_places", "_steps")

    def __init__(self, backend: AttentionBackend, cache: KvCache, batch: Batch) -> None:
        """``batch`` has as many tables as ``cache``."""
        self._backend, self._cache, self._places = backend, cache, cache.tables.places
        batches = [batch.of_table(table) for table in range(cache.tables.count)]
        self._steps = [
            (own.slots, backend.prepare(own, window)) for own, window in zip(batches, cache.tables.windows, strict=True)
        ]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Shapes as in ``AttentionBackend.attend``."""
        slots, step = self._steps[self._places[layer][0]]
        self._cache.write(layer, keys, values, slots)
        return self._backend.attend(layer, queries, keys, values, self._cache, step)


BACKENDS = {
    "flashinfer": "workers.model.attention.paged_flashinfer:FlashInferAttention",
    "triton": "workers.model.attention.paged_triton:TritonAttention",
    "batched": "workers.model.attention.batched:BatchedAttention",
    "reference": "workers.model.attention.reference:ReferenceAttention",
}
AUTO = {"cuda": ("flashinfer", "triton", "batched"), "cpu": ("batched",)}
"""What ``auto`` tries, the fastest first."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A backend, and why each that ``auto`` would rather have taken cannot run here."""

    backend: AttentionBackend
    passed_over: tuple[str, ...] = ()


def choose(name: str, shape: AttentionShape, device: torch.device) -> Chosen:
    """Make the backend that ``engine.attention`` names; ``auto`` takes the fastest that runs here.

    Raises ValueError for an unknown name, and for a named one that cannot run here.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"engine.attention={name!r} is not one of auto, {', '.join(BACKENDS)}")
    passed: list[str] = []
    for one in AUTO.get(device.type, ("batched",)) if name == "auto" else (name,):
        found = _load(one, shape, device)
        if not isinstance(found, str):
            return Chosen(found, tuple(passed))
        passed.append(f"{one}: {found}")
    raise ValueError(f"engine.attention={name} cannot be used ({'; '.join(passed)}); auto takes what runs")


def backend(name: str, shape: AttentionShape, device: torch.device | None = None) -> AttentionBackend:
    """``choose`` without the reasons; on a CPU unless told otherwise."""
    return choose(name, shape, device or torch.device("cpu")).backend


def _load(name: str, shape: AttentionShape, device: torch.device) -> AttentionBackend | str:
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)
        reason = made.unsupported(shape, device) if hasattr(made, "unsupported") else None
        return reason or cast(AttentionBackend, made(shape))
    except ImportError as error:
        missing = error.name or str(error)
        return f"{missing} is not installed (pip install 'forebay[gpu]')"
    except (OSError, RuntimeError) as error:  # a library that is there, but not for this machine
        return f"does not load: {error}"
