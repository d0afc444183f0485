"""FlashInfer's two wrappers as far as we call them, in PyTorch: for a machine without a GPU.

Signatures and rules are those of the library (0.6): what it would refuse is refused, and a wrapper for recorded steps
reads nothing but the buffers that it was given, as a replayed graph does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORKSPACE = 2**20
Pages = tuple[Tensor, Tensor]


def _attend(queries: Tensor, pages: Pages, own: list[int], last: int, scale: float) -> Tensor:
    """One sequence's rows [rows, heads, dim], causal, over its pages."""
    keys, values = (part[own].flatten(0, 1)[: (len(own) - 1) * part.shape[1] + last].double() for part in pages)
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", queries.double(), keys) * scale
    seen = torch.arange(len(keys)) <= torch.arange(len(keys) - len(queries), len(keys))[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, values).to(queries.dtype)


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        assert len(float_workspace_buffer) >= WORKSPACE
        assert not float_workspace_buffer.any(), "it must be zero at first"
        self.plans = 0

    def _planned(self, tables: tuple[Tensor, ...], heads: int, kv_heads: int, sm_scale: float | None) -> None:
        assert all(table.dtype == torch.int32 and table.device.type == "cpu" for table in tables)
        borders, pages, last = tables[-3:]
        assert len(borders) == len(last) + 1
        assert int(borders[-1]) == len(pages)
        assert heads % kv_heads == 0
        assert sm_scale is not None
        self._scale = sm_scale
        self.plans += 1


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._held: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._held = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        tables = indptr, indices, last_page_len
        self._planned(tables, num_qo_heads, num_kv_heads, sm_scale)
        if self._held is None:
            self._tables = tables
            return
        assert len(last_page_len) == len(self._held[2]), "the batch size of a recorded step is fixed"
        for buffer, table in zip(self._held, tables, strict=True):
            buffer[: len(table)] = table
        self._tables = self._held

    def run(self, q: Tensor, paged_kv_cache: Pages) -> Tensor:
        borders, pages, last = self._tables
        assert len(q) == len(last)
        found = [
            _attend(
                q[i : i + 1], paged_kv_cache, pages[borders[i] : borders[i + 1]].tolist(), int(last[i]), self._scale
            )
            for i in range(len(last))
        ]
        return torch.cat(found)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._rows, self._tables = qo_indptr, (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._planned((qo_indptr, *self._tables), num_qo_heads, num_kv_heads, sm_scale)

    def run(self, q: Tensor, paged_kv_cache: Pages) -> Tensor:
        borders, pages, last = self._tables
        assert len(q) == int(self._rows[-1])
        found: list[Any] = []
        for i in range(len(last)):
            rows = q[self._rows[i] : self._rows[i + 1]]
            own = pages[borders[i] : borders[i + 1]].tolist()
            found.append(_attend(rows, paged_kv_cache, own, int(last[i]), self._scale))
        return torch.cat(found)
