"""The engine's switches, and which of them exclude each other. No torch: the gateway refuses with the YAML path.

Rules
- A switch is a field of ``EngineConfig`` that is off by default; it is on when it differs from its default.
- Two switches work together, or ``REFUSALS`` has the pair and says why and what to do. A test runs every pair.
- An exact switch changes no token. A lossy one changes tokens by itself, and then every exact one leaves them alone.
- What depends on the model or the device is refused where these are known (``model/loading.py``), not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Switch:
    """One technique. ``field``: of ``EngineConfig``."""

    field: str
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Two switches that cannot be on together. ``why`` ends with what to do."""

    first: str
    second: str
    why: str


SWITCHES: Sequence[Switch] = (
    Switch("attention"),
    Switch("mode"),
    Switch("kv_cache_reuse"),
    Switch("prefix_cache"),
    Switch("max_chunk_tokens"),
    Switch("cache_share"),
    Switch("kv_dtype", exact=False),
    Switch("speculation"),
    Switch("adapters"),
    Switch("adapter_memory"),
    Switch("role"),
    Switch("weight_dtype", exact=False),
    Switch("tensor_parallel"),
    Switch("pipeline_parallel"),
    Switch("expert_parallel"),
    Switch("tiers"),
)

NO_SWITCHES: Mapping[str, str] = {
    "device": "where it runs",
    "dtype": "what it computes in; every switch is held against the same one",
    "cuda_graphs": "how steps are started on CUDA; the same tokens, tested with a recorder that computes again",
    **dict.fromkeys(
        ("block_size", "blocks", "kv_cache", "memory_margin", "max_step_tokens", "max_running", "max_context"), "a size"
    ),
    **dict.fromkeys(("max_adapters", "max_adapter_rank"), "a bound of adapters"),
    **dict.fromkeys(("threads", "cores", "allocator", "seed"), "of the process"),
    "transfer": "numbers of role",
    "fold_weights": "how bfloat16 weights lie in memory; the same numbers in the same order, tested bit by bit",
    "weight_calibration": "how weight_dtype=int4 rounds when it is loaded; the same format and kernels",
    "rank_timeout_s": "a bound of tensor_parallel and pipeline_parallel",
}
"""The other fields of ``EngineConfig``, and why they need not go with each switch. A new field is here or above."""

REFUSALS: Sequence[Refusal] = (
    Refusal("tiers", "kv_cache_reuse", "nothing that a step computed is used again; leave tiers out"),
    Refusal(
        "speculation",
        "kv_cache_reuse",
        "without a KV cache every step computes everything again, and there is nothing that a guess could save; "
        "remove speculation, or set kv_cache_reuse: true",
    ),
    Refusal(
        "weight_dtype",
        "tensor_parallel",
        "the groups of a quantised matrix do not end where its parts do; leave one of them out, or divide by layers "
        "with pipeline_parallel",
    ),
    Refusal(
        "adapters",
        "pipeline_parallel",
        "an adapter's factors are not divided among devices; leave adapters or pipeline_parallel out",
    ),
    Refusal(
        "adapters",
        "tensor_parallel",
        "an adapter's factors are not divided among devices; leave adapters or tensor_parallel out",
    ),
    Refusal(
        "adapter_memory",
        "pipeline_parallel",
        "an adapter's factors are not divided among devices; leave adapter_memory or pipeline_parallel out",
    ),
    Refusal(
        "adapter_memory",
        "tensor_parallel",
        "an adapter's factors are not divided among devices; leave adapter_memory or tensor_parallel out",
    ),
    Refusal(
        "role",
        "prefix_cache",
        "blocks are handed over from one prefix cache to the other; write role: both, or prefix_cache: true",
    ),
    Refusal(
        "role",
        "kv_cache_reuse",
        "without a KV cache there are no blocks to hand over; write role: both, or kv_cache_reuse: true",
    ),
    Refusal(
        "role",
        "tensor_parallel",
        "each device has its part of a block, and blocks are handed over whole; write role: both, or "
        "tensor_parallel: 1",
    ),
    Refusal(
        "role",
        "pipeline_parallel",
        "each device has its layers of a block, and blocks are handed over whole; write role: both, or "
        "pipeline_parallel: 1",
    ),
)


def is_on(config: EngineConfig, name: str) -> bool:
    """Whether the field differs from its default."""
    return bool(getattr(config, name) != type(config).model_fields[name].default)


def exact_part(config: EngineConfig) -> EngineConfig:
    """The same settings with every lossy switch off: what a lossy one is compared with."""
    fields = type(config).model_fields
    return config.model_copy(update={one.field: fields[one.field].default for one in SWITCHES if not one.exact})


def check(config: EngineConfig, refusals: Sequence[Refusal] = REFUSALS) -> None:
    """Raises ValueError naming both fields, their values, why they exclude each other and the remedy."""
    for one in refusals:
        if is_on(config, one.first) and is_on(config, one.second):
            raise ValueError(
                f"{_said(config, one.first)} and {_said(config, one.second)} exclude each other: {one.why}"
            )


def _said(config: EngineConfig, name: str) -> str:
    value = getattr(config, name)
    return f"{name}={value}" if isinstance(value, str | int | float) else name
