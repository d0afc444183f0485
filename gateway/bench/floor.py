"""The least time a load can take on a machine: what must be read ÷ bandwidth, what must be computed ÷ rate.

Pure arithmetic over a model's shape; ``workers.model.roofline`` measures the machine. Per phase the larger of the two
counts, since reading and computing can overlap at best entirely:

* prefill: every prompt token through every linear and its attention; weights read once, keys and values written once;
* each decode step: all weights and the keys and values of every running sequence read once, one row per sequence.

The first output token comes out of the prefill, so an answer of k tokens takes k - 1 decode steps. Everything else
(norms, sampling, planning, the network) is taken to cost nothing, so no engine reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.model.config import ModelConfig

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its cost."""

    layer_weights: int
    """Elements of all linears but the last."""
    head_weights: int
    """Elements of the last one (hidden → vocabulary)."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Bytes per element."""
    kept_weights: int | None = None
    """Bytes of all linears where they are kept in something else (``engine.weight_dtype``)."""
    kept_token: int | None = None
    """The same of one token's keys and values (``engine.kv_dtype``)."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        if self.kept_token is not None:
            return self.kept_token
        return 2 * self.layers * self.kv_heads * self.head_dim * self.width

    @property
    def weight_bytes(self) -> int:
        """Bytes of all linears."""
        if self.kept_weights is not None:
            return self.kept_weights
        return (self.layer_weights + self.head_weights) * self.width

    def attention_flops(self, context: int) -> int:
        """Of one row that attends to ``context`` positions: scores and weighted sum, all layers."""
        return 4 * self.layers * self.heads * self.head_dim * context


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits."""

    bytes_s: float
    flops_s: float

    def seconds(self, size: float, flops: float) -> float:
        """The least time for both."""
        return max(size / self.bytes_s, flops / self.flops_s)


@dataclass(frozen=True, slots=True)
class Floor:
    """Least seconds of one wave of ``concurrency`` equal requests, and what that makes."""

    concurrency: int
    input: int
    output: int
    prefill_s: float
    decode_s: float

    @property
    def output_tokens_s(self) -> float:
        """Output tokens per second over the whole wave."""
        return self.concurrency * self.output / (self.prefill_s + self.decode_s)

    def to_json(self) -> dict[str, Any]:
        """Figures under the names that reports use."""
        return {
            "output_tokens_s": round(self.output_tokens_s, 2),
            "prefill_s": round(self.prefill_s, 5),
            "decode_s": round(self.decode_s, 5),
            "decode_step_ms": round(self.decode_s / max(1, self.output - 1) * 1e3, 4),
        }


def shape_of(config: ModelConfig, dtype: str) -> Shape:
    """The shape of a Llama-family decoder. Raises ValueError for a dtype of unknown width."""
    if dtype not in WIDTHS:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(WIDTHS)}")
    inner = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    layer = config.hidden * (2 * inner + 2 * keys + 3 * config.intermediate)
    return Shape(
        layer_weights=config.layers * layer,
        head_weights=config.hidden * config.vocab,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        width=WIDTHS[dtype],
    )


def floor(shape: Shape, machine: Machine, *, concurrency: int, input_tokens: int, output_tokens: int) -> Floor:
    """Of ``concurrency`` requests under way at once. Raises ValueError for a count below 1."""
    for name, value in (("concurrency", concurrency), ("input", input_tokens), ("output", output_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    pairs = input_tokens * (input_tokens + 1) // 2
    prefill_flops = 2 * shape.layer_weights * input_tokens + 2 * shape.head_weights + shape.attention_flops(1) * pairs
    prefill_bytes = shape.weight_bytes + concurrency * input_tokens * shape.kv_bytes
    prefill = machine.seconds(prefill_bytes, concurrency * prefill_flops)
    row = 2 * (shape.layer_weights + shape.head_weights)
    decode = sum(
        machine.seconds(
            shape.weight_bytes + concurrency * context * shape.kv_bytes,
            concurrency * (row + shape.attention_flops(context)),
        )
        for context in range(input_tokens + 1, input_tokens + output_tokens)
    )
    return Floor(concurrency, input_tokens, output_tokens, prefill, decode)
