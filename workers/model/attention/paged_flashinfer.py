"""FlashInfer's kernels over our blocks (Ye et al. 2025, arXiv:2501.01005): planned once per step, run once per layer.

The library is optional (``pip install 'forebay[gpu]'``) and knows half precision and common head sizes only. Our cache
has its ``NHD`` layout, ``[pages, page size, key heads, head size]`` for keys and for values, so nothing is copied.

This file has never met a GPU: the machines it was written on had none. What could be tested there is the page tables,
and the calls, with a stand-in that has the library's signatures.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.base import AttentionShape, as_computed_only
from workers.model.batch import Batch
from workers.model.kv_cache import KvCache

WORKSPACE_BYTES = 128 * 2**20
PLAN_BYTES = 8 * 2**20
"""What each of the library's wrappers keeps on the device for its plans."""
HEAD_DIMS = (64, 128, 256)
TENSOR_CORE_GROUP = 4
"""From so many query heads per key head on, a decode's rows fill a matrix unit."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Block tables as the library wants them: int32, on the host."""

    borders: Tensor
    """[sequences + 1]: where each sequence's pages begin in ``pages``."""
    pages: Tensor
    last: Tensor
    """[sequences]: tokens in each one's last page, 1 to the page size."""

    @classmethod
    def of(cls, tables: list[list[int]], contexts: list[int], size: int) -> Pages:
        """The pages that ``contexts`` tokens take in each table."""
        counts = [-(-context // size) for context in contexts]
        pages = [block for table, count in zip(tables, counts, strict=True) for block in table[:count]]
        last = [(context - 1) % size + 1 for context in contexts]
        return cls(_ints(np.concatenate(([0], np.cumsum(counts)))), _ints(pages), _ints(last))


@dataclass(slots=True)
class _Step:
    decodes: int
    """Sequences at the front that have one row."""
    decode: Any
    prompt: Any


class _Held:
    """A step whose addresses stay: the library's wrapper copies every plan into buffers of its own."""

    def __init__(self, owner: FlashInferAttention, rows: int, pages: Tensor, cache: KvCache) -> None:
        device = pages.device
        self.decodes, self.prompt, self.decode = (
            rows,
            None,
            owner.decoder(
                device,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=torch.empty(rows + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=pages,
                paged_kv_last_page_len_buffer=torch.empty(rows, dtype=torch.int32, device=device),
            ),
        )
        self._owner, self._cache = owner, cache

    def refill(self, tables: NDArray[np.int64], contexts: NDArray[np.int64]) -> None:
        """As ``graphs.Steady``."""
        pages = Pages.of(tables.tolist(), contexts.tolist(), self._cache.block_size)
        self._owner.plan_decode(self.decode, pages, self._cache.block_size)


class FlashInferAttention:
    """For CUDA devices with the library installed."""

    name = "flashinfer"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._library: Any = importlib.import_module("flashinfer")
        self._workspace: Tensor | None = None
        self._held_pages: Tensor | None = None
        self._decode: Any = None
        self._prompt: Any = None

    @classmethod
    def unsupported(cls, shape: AttentionShape, device: torch.device) -> str | None:
        """Why it cannot run this, or None."""
        if device.type != "cuda":
            return f"device {device} is no CUDA device"
        if shape.dtype not in (torch.float16, torch.bfloat16):
            return f"dtype {shape.dtype} is neither float16 nor bfloat16"
        if shape.head_dim not in HEAD_DIMS:
            return f"head_dim={shape.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
        if shape.unusual:
            return f"{shape.unusual} are not passed on to it"
        return as_computed_only(shape)

    def decoder(self, device: torch.device, **options: Any) -> Any:
        """A decode wrapper of the library over the common workspace."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # as the library wants it
        tensor_cores = self._shape.group >= TENSOR_CORE_GROUP
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=tensor_cores, **options
        )

    def plan_decode(self, wrapper: Any, pages: Pages, size: int) -> None:
        """Plan single-row sequences."""
        shape = self._shape
        wrapper.plan(
            pages.borders,
            pages.pages,
            pages.last,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            sm_scale=shape.scale,
        )

    def prepare(self, batch: Batch, window: int = 0) -> _Step:
        """Plan the single rows at the front, and the rest as prompts."""
        layout, device = batch.layout, batch.slots.device
        front = next((i for i, rows in enumerate(layout.query_lens) if rows != 1), len(layout.query_lens))
        if self._decode is None:
            self._decode = self.decoder(device)
            self._prompt = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        size, shape = layout.block_size, self._shape
        if front:
            pages = Pages.of(layout.blocks[:front], layout.context_lens[:front], size)
            self.plan_decode(self._decode, pages, size)
        if front < len(layout.query_lens):
            pages = Pages.of(layout.blocks[front:], layout.context_lens[front:], size)
            self._prompt.plan(
                _ints(np.concatenate(([0], np.cumsum(layout.query_lens[front:])))),
                pages.borders,
                pages.pages,
                pages.last,
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                size,
                causal=True,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
                sm_scale=shape.scale,
            )
        return _Step(front, self._decode, self._prompt)

    def hold(self, rows: int, width: int, cache: KvCache) -> _Held:
        """As ``graphs.GraphBackend``; the first call must be the one with most rows."""
        if self._held_pages is None:
            self._held_pages = torch.empty(rows * width, dtype=torch.int32, device=cache.data.device)
        return _Held(self, rows, self._held_pages, cache)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, cache: KvCache, step: _Step | _Held
    ) -> Tensor:
        """As ``AttentionBackend.attend``."""
        queries, pages, front = queries.contiguous(), cache.pages(layer), step.decodes
        decode: Any = step.decode
        prompt: Any = step.prompt
        parts = []
        if front:
            parts.append(decode.run(queries[:front], pages))
        if front < len(queries):
            parts.append(prompt.run(queries[front:], pages))
        found: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found.view(len(queries), -1)


def _ints(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
