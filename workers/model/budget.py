"""How a device's memory is divided before a model is loaded: weights, keys and values, activations, buffers,
adapters, margin.

Rules
- Estimates are of what PyTorch's backends hold at most, from the model's shape and the engine's settings; what cannot
  be known before (fragments, libraries' own memory) is what the margin is for.
- ``kv_cache: auto`` takes what is left of the free memory; on a CPU half of that, since others live there too.
- On CUDA a plan beyond the free memory is refused: its allocation would fail halfway. On a CPU it is only said, since
  free memory there is a moving figure and untouched pages cost nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from workers import cgroup
from workers.config import EngineConfig, kv_bytes_per_token
from workers.engine.scoring import MOST_ROWS
from workers.model.attention.paged_flashinfer import PLAN_BYTES
from workers.model.config import ModelConfig
from workers.model.graphs import buckets, most_rows
from workers.model.kv_cache import KvCacheSizeError, block_count
from workers.model.kv_tables import KvTables
from workers.model.quant.scheme import BITS

SAMPLED_BYTES = 24
"""Per logit of a row that samples: fp32 logits, their scaled copy and its exponentials, a cumulative sum in fp64."""
SCORED_BYTES = 12
"""Per logit of a row that scores a prompt: fp32 logits, a copy without NaN, log probabilities."""
CUDA_BUFFERS = 192 * 2**20
"""Workspace and two plans of FlashInfer, workspace of cuBLAS, inputs of recorded steps."""
CPU_BUFFERS = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes. ``free`` is what the device had before loading; the others are what is planned."""

    free: int
    margin: int
    weights: int
    activations: int
    buffers: int
    kv: int
    blocks: int
    adapters: int = 0
    host: int = 0
    """Blocks of ``engine.tiers`` in host memory, where that is the device's as well."""

    @property
    def planned(self) -> int:
        """Everything but the margin."""
        return self.weights + self.activations + self.buffers + self.kv + self.adapters + self.host

    @property
    def short(self) -> int:
        """By how much plan and margin exceed what is free; 0 when they fit."""
        return max(0, self.planned + self.margin - self.free)

    def figures(self) -> dict[str, int]:
        """For the log, in bytes."""
        return {
            "free": self.free,
            "weights": self.weights,
            "kv": self.kv,
            "activations": self.activations,
            "buffers": self.buffers,
            **({"adapters": self.adapters} if self.adapters else {}),
            **({"host_tier": self.host} if self.host else {}),
            "margin": self.margin,
            "left": self.free - self.planned - self.margin,
        }


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes that a second model takes whose keys and values lie under the same blocks."""

    weights: int = 0
    per_token: int = 0


def divide(
    model: ModelConfig,
    engine: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    beside: Beside = Beside(),
    weights: int | None = None,
    tables: KvTables | None = None,
    *,
    share: int = 1,
    sampled: int | None = None,
) -> Budget:
    """Plan a worker's memory. ``context``: most tokens of a sequence. ``weights``: their bytes, where they are known.
    ``tables``: None = one of all layers. ``share``: processes that divide the device. ``sampled``: logits of each row
    that samples here; None: the model's vocabulary.

    Raises KvCacheSizeError for a cache of fewer than two blocks, and on CUDA for what does not fit.
    """
    free = free_bytes(device) // share
    margin = int(free * engine.memory_margin)
    if weights is None:
        weights = weight_bytes(model, dtype.itemsize, engine.weight_dtype)
    weights += beside.weights
    rows = engine.step_rows
    activations = activation_bytes(model, engine, dtype.itemsize, model.vocab if sampled is None else sampled)
    buffers = CPU_BUFFERS
    if device.type == "cuda":
        buffers = CUDA_BUFFERS + (recorded_bytes(engine, context) if model.moe is None else 0)
    buffers += context * model.head_dim * dtype.itemsize + rows * 64
    if engine.weight_dtype != "auto":  # torch unpacks a matrix whole before it multiplies
        buffers += model.hidden * max(model.vocab, 2 * model.intermediate) * dtype.itemsize
    layers = model.layers if tables is None else tables.depth
    per_token = kv_bytes_per_token(layers, model.kv_heads, model.head_dim, dtype.itemsize, engine.kv_dtype)
    per_token += beside.per_token
    tier = engine.host_tier
    host = tier.size if tier is not None and device.type == "cpu" else 0
    left = free - margin - weights - activations - buffers - engine.adapter_room - host
    blocks = block_count(engine, per_token, left if device.type == "cuda" else left // 2)
    kv = blocks * engine.block_size * per_token
    made = Budget(free, margin, weights, activations, buffers, kv, blocks, engine.adapter_room, host)
    if made.short and device.type == "cuda":
        figures = ", ".join(f"{name} {value:,}" for name, value in made.figures().items() if name != "left")
        raise KvCacheSizeError(
            f"engine.kv_cache={engine.kv_cache}: the plan exceeds the memory of {device} by {made.short:,} bytes "
            f"({figures}); lower it or write auto, lower engine.max_step_tokens, or take a smaller model"
        )
    return made


def recorded_bytes(engine: EngineConfig, context: int) -> int:
    """What recorded steps keep: the block tables of the largest, and each one's plan, where FlashInfer makes plans."""
    if not engine.cuda_graphs or engine.attention not in ("auto", "flashinfer", "triton"):
        return 0
    most = most_rows(engine)
    plans = 0 if engine.attention == "triton" else len(buckets(most)) * PLAN_BYTES
    return most * -(-context // engine.block_size) * 8 + plans


def weight_bytes(model: ModelConfig, width: int, weight_dtype: str = "auto") -> int:
    """All weights of a decoder of the Llama family; a tied head counts once."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = model.hidden * (query + 2 * key) + query * model.hidden
    vectors = (
        (4 if model.post_norms else 2) * model.hidden
        + (query + 2 * key) * model.qkv_bias
        + model.hidden * model.output_bias
    )
    vectors += 2 * model.head_dim * model.qk_norm
    ends = model.vocab * model.hidden * (1 if model.tied else 2)
    total = width * (model.layers * (matrices + vectors) + _mlp_weights(model) + ends + model.hidden)
    if weight_dtype in BITS:
        inner, outer = (width - bits / 8 for bits in BITS[weight_dtype])
        fine = ends + model.layers * model.hidden * key
        coarse = model.layers * (matrices - model.hidden * key) + _mlp_matrices(model)
        total -= int(inner * coarse + outer * fine)
    return total


def _mlp_matrices(model: ModelConfig) -> int:
    """What of ``_mlp_weights`` is quantised: neither routers nor biases."""
    plain = 3 * model.hidden * model.intermediate
    if model.moe is None:
        return model.layers * plain
    mixed = 3 * model.hidden * (model.moe.experts * model.moe.intermediate + model.moe.shared)
    return len(model.moe.dense) * plain + (model.layers - len(model.moe.dense)) * mixed


def _mlp_weights(model: ModelConfig) -> int:
    """Of all layers, how many numbers."""
    hidden, moe = model.hidden, model.moe
    plain = 3 * hidden * model.intermediate + (2 * model.intermediate + hidden) * model.mlp_bias
    if moe is None:
        return model.layers * plain
    held = moe.experts if moe.held is None else len(moe.held)
    mixed = hidden * moe.experts + 3 * held * hidden * moe.intermediate + hidden * (3 * moe.shared + (moe.shared > 0))
    return len(moe.dense) * plain + (model.layers - len(moe.dense)) * mixed


def activation_bytes(model: ModelConfig, engine: EngineConfig, width: int, sampled: int) -> int:
    """What the widest layer and the sampler hold of a full step at once."""
    rows = engine.step_rows
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    inner = model.intermediate if model.moe is None else model.moe.per_token * model.moe.intermediate + model.moe.shared
    layer = rows * width * (3 * model.hidden + max(2 * heads, 4 * max(inner, model.intermediate)))
    running = engine.max_step_tokens if engine.max_running == "auto" else engine.max_running
    return layer + min(rows, running) * sampled * SAMPLED_BYTES + min(rows, MOST_ROWS) * sampled * SCORED_BYTES


def free_bytes(device: torch.device) -> int:
    """What nobody holds of the device; on a CPU within this process's control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available(), cgroup.memory())


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
