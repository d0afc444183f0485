"""Paged keys and values: one tensor ``[layers, 2, blocks, block_size, kv_heads, head_dim]``, or as many rows of bytes.

Rules
- Which block holds what is the engine's business (block_pool.py); here are only the bytes. A block holds all layers, or
  those of one table (``kv_tables.py``).
- A token's slot is ``block * block_size + offset``: seen as ``[blocks * block_size, kv_heads * head_dim]``, every token
  is one contiguous row, so that a write is a row scatter and a read of any set of tokens a row gather.
- What a quantised cache holds is what everybody reads, also the step that wrote it: else chunks would change answers.
- What leaves the cache and comes back (tiers, other workers) is whole blocks as bytes: ``save``, ``restore``.
- Never read a slot that the reading sequence has not written: another tenant's numbers would be in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.config import EngineConfig, kv_bytes_per_token
from workers.model.config import ModelConfig
from workers.model.kv_format import FORMATS, KvFormat
from workers.model.kv_tables import KvTables, one_table


class KvCacheSizeError(ValueError):
    """The configured cache is too small or does not fit the device."""


def block_count(engine: EngineConfig, bytes_per_token: int, left: int = 0) -> int:
    """Whole blocks that ``engine.kv_cache`` holds, or ``engine.blocks`` when given.

    ``left``: bytes that ``auto`` takes. Raises KvCacheSizeError below 2.
    """
    if engine.blocks is not None:
        return engine.blocks
    per_block = bytes_per_token * engine.block_size
    if engine.kv_cache == "auto":
        if left < 2 * per_block:
            raise KvCacheSizeError(
                f"engine.kv_cache=auto: {left:,} bytes are left on the device, and two blocks take {2 * per_block:,}; "
                "free some, or take a smaller model"
            )
        return left // per_block
    blocks = engine.kv_cache // per_block
    if blocks < 2:
        raise KvCacheSizeError(
            f"engine.kv_cache={engine.kv_cache} bytes holds {blocks} blocks of {per_block} bytes; "
            f"at least 2 are needed, so give it {2 * per_block} bytes or more"
        )
    return blocks


def no_room(blocks: int, size: int, where: str) -> str:
    """What to say of a cache of ``size`` bytes that the memory has not."""
    return (
        f"engine.kv_cache: {blocks} blocks of keys and values ({size} bytes) do not fit {where}; lower it, or "
        "engine.blocks where that is set"
    )


class KvCache:
    """The worker's keys and values, zero at first."""

    def __init__(
        self,
        model: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scratch: bool = False,
        tables: KvTables | None = None,
    ) -> None:
        """Allocate. ``scratch``: one more block, number ``blocks``, which no sequence has. ``tables``: None = one.

        Raises KvCacheSizeError when the device has not the memory.
        """
        self.blocks, self.block_size, self._model, self._dtype = blocks, block_size, model, dtype
        self.tables = tables or one_table(model.layers)
        self.bytes_per_token = self._bytes_per_token()
        """Of a token in one block: in the layers of one table."""
        self.block_bytes = block_size * self.bytes_per_token
        """What ``save`` makes of one block: everything that its tokens left in the cache, in every layer."""
        row, held = self._row()
        try:
            self.data = torch.zeros(
                (self.tables.depth, 2, blocks + scratch, block_size, *row), dtype=held, device=device
            )
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise KvCacheSizeError(no_room(blocks, blocks * self.block_bytes, f"on {device}")) from error
        rows = self.data.view(self.tables.depth, 2, (blocks + scratch) * block_size, -1)
        self._rows = [(rows[place, 0], rows[place, 1]) for _, place in self.tables.places]

    def _bytes_per_token(self) -> int:
        model = self._model
        return kv_bytes_per_token(self.tables.depth, model.kv_heads, model.head_dim, self._dtype.itemsize)

    def _row(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what a token's keys, or values, take in one layer."""
        return (self._model.kv_heads, self._model.head_dim), self._dtype

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a layer, each a view [blocks * block_size, kv_heads * head_dim] indexed by slot."""
        return self._rows[layer]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of a layer, each a view [blocks, block_size, kv_heads, head_dim]."""
        place = self.tables.places[layer][1]
        return self.data[place, 0], self.data[place, 1]

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] at ``slots`` [tokens]."""
        key_rows, value_rows = self._rows[layer]
        key_rows.index_copy_(0, slots, keys.reshape(len(slots), -1))
        value_rows.index_copy_(0, slots, values.reshape(len(slots), -1))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots`` [tokens], each [tokens, kv_heads, head_dim] in the model's type."""
        heads, dim = self._model.kv_heads, self._model.head_dim
        keys, values = (rows.index_select(0, slots).view(len(slots), heads, dim) for rows in self._rows[layer])
        return keys, values

    def kept(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What ``gather`` gives for them once they are written."""
        return keys, values

    def zero(self, blocks: list[int]) -> None:
        """Overwrite blocks with zeros in every layer."""
        if blocks:
            self.data[:, :, torch.tensor(blocks, device=self.data.device)] = 0

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in every layer; all sources are read before any destination is written."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.data.device).unbind(1)
            self.data[:, :, targets] = self.data[:, :, sources]

    def save(self, blocks: list[int]) -> Tensor:
        """The bytes of ``blocks``, a uint8 tensor [len(blocks), block_bytes] in host memory: a copy, in this layout."""
        held = self.data.index_select(2, torch.tensor(blocks, dtype=torch.int64, device=self.data.device))
        return held.movedim(2, 0).contiguous().flatten(1).view(torch.uint8).cpu()

    def restore(self, blocks: list[int], saved: Tensor) -> None:
        """Put back into ``blocks`` what ``save`` made of as many. ValueError when ``saved`` is not of this cache."""
        check_saved(saved, blocks, self.block_bytes)
        if blocks:
            one = self.data.select(2, 0).shape
            back = saved.to(self.data.device).view(self.data.dtype).view(len(blocks), *one).movedim(0, 2)
            self.data.index_copy_(2, torch.tensor(blocks, device=self.data.device), back)


class QuantisedKvCache(KvCache):
    """Keys and values in eight bits: ``[layers, 2, blocks, block_size, bytes of a token's row]``, see ``kv_format``."""

    def __init__(
        self,
        model: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        held: KvFormat,
        tables: KvTables | None = None,
    ) -> None:
        """Allocate; ``dtype`` is what the model computes in. Raises KvCacheSizeError when the memory is not there."""
        self._format = held
        super().__init__(model, blocks, block_size, dtype, device, tables=tables)

    def _bytes_per_token(self) -> int:
        model = self._model
        depth = self.tables.depth
        return kv_bytes_per_token(depth, model.kv_heads, model.head_dim, self._dtype.itemsize, self._format.name)

    def _row(self) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.bytes_per_token // (2 * self.tables.depth),), torch.uint8

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """As ``KvCache.write``, rounded to the format."""
        for rows, new in zip(self._rows[layer], (keys, values), strict=True):
            rows.index_copy_(0, slots, self._format.pack(new))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As ``KvCache.gather``."""
        keys, values = (self._unpacked(rows.index_select(0, slots)) for rows in self._rows[layer])
        return keys, values

    def kept(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As ``KvCache.kept``."""
        return self._unpacked(self._format.pack(keys)), self._unpacked(self._format.pack(values))

    def _unpacked(self, rows: Tensor) -> Tensor:
        return self._format.unpack(rows, self._model.kv_heads, self._dtype)


def make_cache(
    model: ModelConfig,
    blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: str = "auto",
    scratch: bool = False,
    tables: KvTables | None = None,
) -> KvCache:
    """The cache that ``engine.kv_dtype`` names. Raises KvCacheSizeError when the device has not the memory."""
    if kv_dtype == "auto":
        return KvCache(model, blocks, block_size, dtype, device, scratch=scratch, tables=tables)
    return QuantisedKvCache(model, blocks, block_size, dtype, device, FORMATS[kv_dtype], tables)


def check_saved(saved: Tensor, blocks: list[int], block_bytes: int) -> None:
    """Raises ValueError unless ``saved`` can be what ``save`` made of as many blocks of ``block_bytes``."""
    if saved.dtype != torch.uint8 or saved.shape != (len(blocks), block_bytes):
        raise ValueError(
            f"saved blocks are {saved.dtype} {list(saved.shape)}; for {len(blocks)} blocks of this cache they must be "
            f"torch.uint8 [{len(blocks)}, {block_bytes}]"
        )
