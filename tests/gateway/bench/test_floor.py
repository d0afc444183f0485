"""The floor: the issue's own figures, and the properties that make it one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.bench.floor import Machine, floor, shape_of
from workers.model.config import ModelConfig, RopeConfig

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab=49152,
    hidden=576,
    intermediate=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    max_context=8192,
    rms_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    tied=True,
)
ZEN4 = Machine(50e9, 429e9)


def test_the_shape_of_smollm2() -> None:
    shape = shape_of(SMOLLM2, "bfloat16")
    assert shape.layer_weights + shape.head_weights == 134_479_872
    assert shape.kv_bytes == 23_040
    assert shape_of(SMOLLM2, "float32").weight_bytes == 2 * shape.weight_bytes
    with pytest.raises(ValueError, match="int8"):
        shape_of(SMOLLM2, "int8")


@pytest.mark.parametrize(("running", "tokens_s"), [(1, 129), (8, 325), (32, 350), (64, 350)])
def test_the_published_floor(running: int, tokens_s: int) -> None:
    """512 in / 128 out at 50 GB/s and 429 GFLOP/s, as the table of anchors has it."""
    limit = floor(shape_of(SMOLLM2, "bfloat16"), ZEN4, concurrency=running, input_tokens=512, output_tokens=128)
    assert round(limit.output_tokens_s) == tokens_s


def test_one_running_is_bound_by_memory_and_many_by_arithmetic() -> None:
    shape = shape_of(SMOLLM2, "bfloat16")

    def decode(machine: Machine, running: int) -> float:
        return floor(shape, machine, concurrency=running, input_tokens=512, output_tokens=128).decode_s

    assert decode(Machine(100e9, 429e9), 1) == pytest.approx(decode(ZEN4, 1) / 2)
    assert decode(Machine(50e9, 858e9), 1) == decode(ZEN4, 1)
    assert decode(Machine(50e9, 858e9), 64) == pytest.approx(decode(ZEN4, 64) / 2, rel=0.05)


def test_a_single_token_needs_no_decode_step() -> None:
    limit = floor(shape_of(SMOLLM2, "bfloat16"), ZEN4, concurrency=1, input_tokens=16, output_tokens=1)
    assert limit.decode_s == 0
    assert limit.prefill_s > 0


@pytest.mark.parametrize("name", ["concurrency", "input_tokens", "output_tokens"])
def test_counts_below_one_are_refused(name: str) -> None:
    counts = {"concurrency": 1, "input_tokens": 1, "output_tokens": 1, name: 0}
    with pytest.raises(ValueError, match=name.removesuffix("_tokens")):
        floor(shape_of(SMOLLM2, "bfloat16"), ZEN4, **counts)


def test_what_is_kept_in_fewer_bits_is_read_in_fewer_bytes() -> None:
    """``engine.weight_dtype`` and ``kv_dtype``: a floor over the full width would be passed."""
    shape = shape_of(SMOLLM2, "bfloat16")
    half = replace(shape, kept_weights=shape.weight_bytes // 2, kept_token=shape.kv_bytes // 2)
    load = {"concurrency": 1, "input_tokens": 512, "output_tokens": 128}
    assert floor(half, ZEN4, **load).decode_s == pytest.approx(floor(shape, ZEN4, **load).decode_s / 2)
