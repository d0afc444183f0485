"""A decoder held by the kernel: packs the weights, owns the cache tensor, runs steps. One engine thread calls it.

Rules
- Every tensor whose address the kernel holds is referenced here until the handle is destroyed.
- Results are those of ``step.cpp``: independent of batch, chunking and thread count, bit for bit.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.config import kv_bytes_per_token
from workers.model import rope
from workers.model.config import ModelConfig
from workers.model.kv_cache import KvCacheSizeError, check_saved, no_room
from workers.model.kv_tables import KvTables, one_table
from workers.model.native import pack
from workers.model.native.abi import Layer, Linear, Model, Step, make
from workers.model.native.adapters import NativeAdapter
from workers.model.native.build import NativeUnavailableError, load
from workers.model.quant.matrix import Matrix
from workers.model.weights import LayerWeights, Weights, norm_weight

CHOICE = struct.Struct("@fffid")
"""Temperature, top_p, min_p, top_k and a uniform number in [0, 1) (``draw.h``)."""
MAX_HEAD_DIM = 256
MAX_GROUP = 64
_NO_MEMORY = 2
_REMEDY = "lower engine.max_step_tokens, engine.max_running or engine.kv_cache"


TOUCHED = 1 << 30
"""Bytes of a cache that get memory before they are used, of a larger one those that are used first; and bytes that the
system has to have left for that."""
_PIECE = 2 << 20
KV_DTYPES = ("auto", "int8", "fp8")
"""In the order of ``FbModel.kv``."""


def unsupported(
    config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device, kv_dtype: str = "auto"
) -> str | None:
    """Why the kernel cannot run this, or None. Names the figure that stands in the way."""
    checks = (
        (device.type == "cpu", f"device {device} is not a CPU"),
        (dtype in (torch.float32, torch.bfloat16), f"dtype {dtype} is neither float32 nor bfloat16"),
        (kv_dtype in KV_DTYPES, f"engine.kv_dtype={kv_dtype} is none of {', '.join(KV_DTYPES)}"),
        (block_size % pack.LANES == 0, f"engine.block_size={block_size} is not a multiple of {pack.LANES}"),
        (config.hidden % pack.PANEL == 0, f"hidden_size={config.hidden} is not a multiple of {pack.PANEL}"),
        (config.intermediate % pack.LANES == 0, f"intermediate_size={config.intermediate} is not a multiple of 16"),
        (config.head_dim % 16 == 0, f"head_dim={config.head_dim} is not a multiple of 16"),
        (config.head_dim <= MAX_HEAD_DIM, f"head_dim={config.head_dim} is over {MAX_HEAD_DIM}"),
        (
            config.heads <= MAX_GROUP * config.kv_heads,
            f"num_attention_heads={config.heads} is over {MAX_GROUP} times num_key_value_heads={config.kv_heads}",
        ),
    )
    return next((reason for fine, reason in checks if not fine), None)


class NativeCache:
    """Keys and values: ``[layers, blocks, numbers of a block]``, a block being whole sub-blocks of 16 tokens.

    Numbers are of the model's type; of a quantised cache they are bytes, and the scales' bytes lie among them (kept.h).
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: str = "auto",
        tables: KvTables | None = None,
    ) -> None:
        """Allocate, zeroed. ``tables``: None = one. Raises KvCacheSizeError when the memory is not there."""
        self.blocks, self.block_size, self.kv_dtype = blocks, block_size, kv_dtype
        self.tables = tables or one_table(config.layers)
        depth = self.tables.depth
        self.bytes_per_token = kv_bytes_per_token(depth, config.kv_heads, config.head_dim, dtype.itemsize, kv_dtype)
        """Of a token in one block: in the layers of one table."""
        self.block_bytes = block_size * self.bytes_per_token
        """What ``save`` makes of one block: everything that its tokens left in the cache, in every layer."""
        held = dtype if kv_dtype == "auto" else torch.uint8
        per_block = self.block_bytes // (depth * held.itemsize)
        try:
            flat = pack.buffer(depth * blocks * per_block, held)
        except (OSError, ValueError, OverflowError) as error:
            raise KvCacheSizeError(no_room(blocks, blocks * self.block_bytes, "in memory")) from error
        self.data = flat.view(depth, blocks, per_block)
        self._untouched = _pieces(self.data, min(blocks, TOUCHED // self.block_bytes))

    def touch(self) -> bool:
        """Have the system find memory for the next 2 MiB, in the order in which blocks are taken. False: no more.

        Who writes first waits for it otherwise, and on a virtual machine whose memory is found as late as its own
        that takes up to 4 ms for 1 MiB.
        """
        piece = next(self._untouched, None)
        return piece is not None and pack.touch(piece)

    def zero(self, blocks: list[int]) -> None:
        """Overwrite blocks with zeros in every layer."""
        if blocks:
            self.data[:, torch.tensor(blocks)] = 0

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in every layer; all sources are read before any destination is written."""
        if pairs:
            sources, targets = torch.tensor(pairs).unbind(1)
            self.data[:, targets] = self.data[:, sources]

    def save(self, blocks: list[int]) -> Tensor:
        """The bytes of ``blocks``, a uint8 tensor [len(blocks), block_bytes]: a copy, in this layout."""
        held = self.data.index_select(1, torch.tensor(blocks, dtype=torch.int64))
        return held.movedim(1, 0).contiguous().flatten(1).view(torch.uint8)

    def restore(self, blocks: list[int], saved: Tensor) -> None:
        """Put back into ``blocks`` what ``save`` made of as many. ValueError when ``saved`` is not of this cache."""
        check_saved(saved, blocks, self.block_bytes)
        if blocks:
            back = saved.view(self.data.dtype).view(len(blocks), self.data.shape[0], -1).movedim(0, 1)
            self.data.index_copy_(1, torch.tensor(blocks), back)


def _pieces(data: Tensor, blocks: int) -> Iterator[Tensor]:
    """2 MiB each of the first ``blocks``. Not the cache's method: it would keep the cache, and be kept by it."""
    each = max(1, _PIECE // (data.shape[2] * data.itemsize))
    for start in range(0, blocks, each):
        yield from data[:, start : min(start + each, blocks)]


@dataclass(slots=True)
class Rows:
    """One step laid out flat; every array is int32. ``slots`` and ``table`` once for each of the model's tables."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    positions: array[int] = field(default_factory=lambda: array("i"))
    slots: array[int] = field(default_factory=lambda: array("i"))
    first: array[int] = field(default_factory=lambda: array("i"))
    count: array[int] = field(default_factory=lambda: array("i"))
    table: array[int] = field(default_factory=lambda: array("i"))
    blocks: array[int] = field(default_factory=lambda: array("i"))
    sample_rows: array[int] = field(default_factory=lambda: array("i"))
    lora: array[int] = field(default_factory=lambda: array("i"))
    """Of every chunk, which of the step's adapters it has, or -1; empty where there are none."""


class NativeDecoder:
    """The whole decoder in one call per step. Copies what it takes of ``weights``.

    Raises NativeUnavailableError before it takes any, or ModelStoreError for a wrong one.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_context: int,
        cache: NativeCache,
        dtype: torch.dtype,
        threads: int,
        *,
        low_width: int = 0,
        folds: bool = True,
    ) -> None:
        """``low_width``: of the adapters that steps may bring (``adapters.low_width``); 0: none. ``folds``: keep
        bfloat16 weights in fewer bits where that is exact."""
        reason = unsupported(config, cache.block_size, dtype, torch.device("cpu"), cache.kv_dtype)
        if reason:
            raise NativeUnavailableError(reason)
        self._lib = load()
        self.isa = self._lib.fb_isa().decode()
        self.config, self._threads, self._dtype, self._folds = config, threads, dtype, folds
        self.rows_computed = 0
        """Rows that went through the linears since the start: exactly the planned tokens."""
        self.folded_away = 0
        """Bytes of ``weight_bytes`` that are not taken: what folding saves."""
        self._kept: list[object] = [cache]
        self._bytes = 0
        self._ropes = {
            kind: [self._keep(part.contiguous()) for part in rope.table(kind, config.head_dim, max_context)]
            for kind in {config.rope, config.local_rope or config.rope}
        }
        self._layers = (Layer * config.layers)()
        for index in range(config.layers):
            table, place = cache.tables.places[index]
            self._layers[index] = self._layer(index, weights, cache.data[place], table, cache.tables.windows[table])
        hidden = config.hidden
        embed = self._packed(weights.matrix("model.embed_tokens.weight", (config.vocab, hidden)))
        norm = self._vector(norm_weight(weights.take("model.norm.weight", (hidden,)), config.unit_norms))
        head = embed if config.tied else self._packed(weights.matrix("lm_head.weight", (config.vocab, hidden)))
        self._head_width = int(head.n)
        self._model = make(
            Model,
            {
                "bf16": int(dtype == torch.bfloat16),
                "layers": config.layers,
                "hidden": hidden,
                "heads": config.heads,
                "kv_heads": config.kv_heads,
                "head_dim": config.head_dim,
                "ffn": config.intermediate,
                "rotary": config.head_dim,
                "block_size": cache.block_size,
                "gelu": int(config.gelu),
                "max_rows": 0,
                "max_samples": 0,
                "eps": config.rms_eps,
                "scale": config.query_scale or config.head_dim**-0.5,
                "softcap": config.score_cap,
                # In the weights' type, as transformers rounds it.
                "embed_scale": torch.tensor(hidden**0.5, dtype=dtype).item() if config.scaled_embedding else 1.0,
                "logit_softcap": config.logit_cap,
                "kv": KV_DTYPES.index(cache.kv_dtype),
                "low_width": low_width,
                "norm": norm,
                "embed": embed,
                "head": head,
                "layer": self._layers,
            },
        )
        self._handle: int | None = None
        self._logits = torch.empty(0)
        self._best: array[int] = array("i")

    def forward(
        self, rows: Rows, choices: bytearray | None = None, adapters: Sequence[NativeAdapter] = ()
    ) -> tuple[Tensor, array[int]]:
        """fp32 logits [samples, vocab] (valid until the next call) and each one's token.

        ``choices``: a ``CHOICE`` for each; without it, and where its temperature is 0, the most likely. Below 0 where
        there is none, or where a logit to draw from is not finite. ``adapters``: what ``rows.lora`` counts.
        Raises MemoryError for a step whose buffers do not fit; a smaller one may be run afterwards.
        """
        count, samples = len(rows.tokens), len(rows.sample_rows)
        self._grow(count, samples)
        assert self._handle is not None
        tables = (ctypes.c_void_p * len(adapters))(*(adapter.address for adapter in adapters))
        arrays = {name: getattr(rows, name).buffer_info()[0] for name in Rows.__slots__}
        step = make(
            Step,
            {
                "rows": count,
                "chunks": len(rows.first),
                "samples": samples,
                "vocab": self.config.vocab,
                "logits": self._logits.data_ptr(),
                "best": self._best.buffer_info()[0],
                "choices": None if choices is None else ctypes.addressof(ctypes.c_char.from_buffer(choices)),
                "adapters": ctypes.addressof(tables),
                "loras": len(adapters),
                "unused": 0,
                **arrays,
            },
        )
        failed = self._lib.fb_step(self._handle, ctypes.addressof(step))
        if failed == _NO_MEMORY:
            raise MemoryError(f"no memory to lay out a step of {count} rows; {_REMEDY}")
        if failed:
            raise ValueError(f"a step of {count} rows and {samples} samples exceeds what the kernel was made for")
        self.rows_computed += count
        return self._logits[:samples, : self.config.vocab], self._best[:samples]

    def weight_bytes(self) -> int:
        """Bytes of all packed weights, before they are folded; a tied head counts once."""
        return self._bytes

    def close(self) -> None:
        """End the kernel's threads and free its buffers; idempotent."""
        if self._handle is not None:
            self._lib.fb_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def _grow(self, rows: int, samples: int) -> None:
        model = self._model
        if self._handle is not None and rows <= model.max_rows and samples <= model.max_samples:
            return
        self.close()
        before = model.max_rows, model.max_samples
        # With room to spare: buffers are made anew, which takes as long as a step, and batches grow by a row at a time.
        model.max_rows = max(model.max_rows, rows + rows // 8, 64)
        model.max_samples = max(model.max_samples, samples + samples // 4, 16)
        self._logits = torch.empty(model.max_samples, self._head_width)
        self._best = array("i", bytes(4 * model.max_samples))
        self._handle = self._lib.fb_create(ctypes.addressof(model), self._threads)
        if self._handle is None:
            model.max_rows, model.max_samples = before
            raise MemoryError(
                f"the kernel's buffers for {rows} rows and {samples} samples, or its {self._threads} threads, do not "
                f"fit in memory; {_REMEDY}"
            )

    def _layer(self, index: int, weights: Weights, cache: Tensor, table: int, window: int) -> Layer:
        config, take = self.config, LayerWeights(weights, index)
        hidden, ffn, head_dim = config.hidden, config.intermediate, config.head_dim
        query, key = config.heads * head_dim, config.kv_heads * head_dim

        def norm(name: str, size: int) -> int:
            return self._vector(take.norm(name, size, config.unit_norms))

        names, sizes = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (query, key, key)
        gate, up = (take.matrix(f"mlp.{name}_proj", ffn, hidden) for name in ("gate", "up"))
        cos, sin = self._ropes[config.rope_of(index)]
        gated = None
        if config.mlp_bias:
            gated = pack.gated_bias(take.bias("mlp.gate_proj", ffn), take.bias("mlp.up_proj", ffn))
        layer: Layer = make(
            Layer,
            {
                "attn_norm": norm("input_layernorm", hidden),
                "q_norm": norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
                "k_norm": norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
                "post_attn_norm": norm("post_attention_layernorm", hidden) if config.post_norms else None,
                "ffn_norm": norm(config.mlp_norm_name, hidden),
                "post_ffn_norm": norm("post_feedforward_layernorm", hidden) if config.post_norms else None,
                "qkv": self._packed(*take.fused(names, sizes, hidden, config.qkv_bias)),
                "o": self._packed(*take.fused(("self_attn.o_proj",), (hidden,), query, config.output_bias)),
                "gate_up": self._packed(pack.gated(gate, up, self._dtype), gated),
                "down": self._packed(*take.fused(("mlp.down_proj",), (hidden,), ffn, config.mlp_bias)),
                "cache": cache.data_ptr(),
                "cos": cos,
                "sin": sin,
                "window": window,
                "table": table,
            },
        )
        return layer

    def _packed(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        packed = pack.packed(weight, self._dtype)
        self._bytes += packed.nbytes
        if self._folds:
            dense = packed.nbytes
            packed = pack.folded(packed, weight.shape[1], self._lib.fb_fold)
            self.folded_away += dense - packed.nbytes
        self._kept.append(packed)
        if bias is not None:
            bias = pack.padded_bias(bias)
            self._kept.append(bias)
            self._bytes += bias.nbytes
        return pack.linear(packed, weight.shape[1], bias)

    def _vector(self, weight: Tensor) -> int:
        self._bytes += weight.numel() * 4
        return self._keep(weight.to(torch.float32, copy=True))

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()
