"""Keys and values in eight bits: how far a number, a score and an answer may move, and what must not move at all."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench, logits_of
from workers.config import EngineConfig, kv_bytes_per_token
from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence
from workers.model.attention import Attend, AttentionShape, choose
from workers.model.attention.base import as_computed_only
from workers.model.batch import build
from workers.model.config import ModelConfig, RopeConfig
from workers.model.kv_cache import make_cache
from workers.model.kv_format import FORMATS, KvFormat
from workers.model.loading import load
from workers.protocol import Generate, SamplingParams

CPU = torch.device("cpu")
HEADS, DIM = 3, 16
BOTH = pytest.mark.parametrize("held", FORMATS.values(), ids=FORMATS.keys())


def error(held: KvFormat, x: torch.Tensor) -> torch.Tensor:
    """The most that a number of x [tokens, heads, dim] may move: the module's first promises."""
    scale = (1 + 2**-7) * x.abs().amax(-1, keepdim=True) / held.largest
    if held.element == torch.int8:
        return (scale / 2).expand_as(x) * 1.000001
    return torch.maximum(x.abs() / 16, scale / 1024) * 1.000001


@BOTH
@given(st.integers(0, 2**32 - 1), st.floats(-35, 35), st.floats(0, 3))
def test_a_number_moves_no_further_than_promised(held: KvFormat, seed: int, power: float, spread: float) -> None:
    """Any magnitude, with outliers of any size."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(5, HEADS, DIM, generator=random) * torch.exp(torch.randn(DIM, generator=random) * spread) * 2**power
    rows = held.pack(x)
    assert rows.dtype == torch.uint8
    assert rows.shape == (5, HEADS * (DIM + 2))
    found = held.unpack(rows, HEADS, torch.float32)
    assert bool(((found - x).abs() <= error(held, x)).all())


@BOTH
def test_a_token_is_rounded_by_itself(held: KvFormat) -> None:
    """engine H5: the same bits alone and in any company; zeros stay zeros."""
    x = torch.randn(9, HEADS, DIM)
    x[4] = 0
    together = held.pack(x)
    assert torch.equal(torch.cat([held.pack(x[i : i + 1]) for i in range(9)]), together)
    assert not held.unpack(together, HEADS, torch.float32)[4].any()
    assert not together[4].any()


@BOTH
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_head_stays_broken_and_alone(held: KvFormat, broken: float) -> None:
    x = torch.randn(2, HEADS, DIM)
    whole = held.unpack(held.pack(x), HEADS, torch.float32)
    x[1, 2, 5] = broken
    found = held.unpack(held.pack(x), HEADS, torch.float32)
    assert bool(found[1, 2].isnan().all())
    found[1, 2] = whole[1, 2]
    assert torch.equal(found, whole)


@BOTH
def test_a_cache_keeps_what_it_says_and_moves_scales_along(held: KvFormat) -> None:
    """Write, gather, kept, copy, zero, save and restore: one row per token, whatever is in it."""
    model = ModelConfig("x", 10, 32, 32, 2, HEADS, HEADS, DIM, 512, 1e-5, RopeConfig(), True)
    cache = make_cache(model, 4, 4, torch.float32, CPU, kv_dtype=held.name)
    keys, values, slots = torch.randn(3, HEADS, DIM) * 7, torch.randn(3, HEADS, DIM), torch.tensor([1, 5, 6])
    cache.write(1, keys, values, slots)
    first = cache.gather(1, slots)
    for part, kept, new in zip(first, cache.kept(keys, values), (keys, values), strict=True):
        assert torch.equal(part, kept)
        assert bool(((part - new).abs() <= error(held, new)).all())
    cache.copy([(1, 3)])
    saved = cache.save([1])
    assert saved.shape == (1, cache.block_bytes)
    cache.zero([1])
    assert not cache.gather(1, torch.tensor([4, 5, 6, 7]))[0].any()
    cache.restore([2], saved)
    for block in (2, 3):
        moved = cache.gather(1, torch.tensor([block * 4 + 1, block * 4 + 2]))
        assert all(torch.equal(part, old[1:]) for part, old in zip(moved, first, strict=True))


def test_a_block_takes_about_half_of_bfloat16s_bytes() -> None:
    """Issue 7: at least 1.8 times the tokens in the same bytes, from heads of 32 numbers on."""
    for dim in (32, 64, 128, 256):
        assert kv_bytes_per_token(30, 3, dim, 2) >= 1.8 * kv_bytes_per_token(30, 3, dim, 2, "int8")
    model = ModelConfig("x", 10, 32, 32, 2, HEADS, HEADS, 64, 512, 1e-5, RopeConfig(), True)
    cache = make_cache(model, 5, 16, torch.bfloat16, CPU, kv_dtype="int8")
    assert cache.data.nbytes == 5 * 16 * cache.bytes_per_token == 5 * 16 * 2 * 2 * HEADS * 66


@BOTH
@pytest.mark.parametrize("name", ["batched", "reference"])
def test_scores_and_outputs_stay_within_the_bound(held: KvFormat, name: str) -> None:
    """The module's third promise, against attention in double precision on what was meant to be written."""
    heads, dim, context = 4, 32, 50
    random = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(context, heads, dim, generator=random) * size for size in (0.5, 1, 2))
    found = _attended(name, held.name, q, k, v).double()
    eps = torch.einsum("qhd,khd->hqk", q.abs(), error(held, k)).amax().item() / math.sqrt(dim)
    of_values = error(held, v).amax().item()
    allowed = (math.exp(2 * eps) - 1) * (v.abs().amax().item() + of_values) + of_values + 1e-5
    moved = (found - _exact(q, k, v)).abs().amax().item()
    assert 1e-4 < moved <= allowed
    assert allowed <= {"int8": 0.8, "fp8": 6.0}[held.name]  # of values up to 8: it says something


def _attended(name: str, kv_dtype: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last half of the rows as a chunk of their own, the first in the cache already."""
    context, heads, dim = q.shape
    half = context // 2
    model = ModelConfig("x", 10, 32, 32, 1, heads, heads, dim, 512, 1e-5, RopeConfig(), True)
    cache = make_cache(model, 8, 16, torch.float32, CPU, kv_dtype=kv_dtype)
    backend = choose(name, AttentionShape(heads, heads, dim, kv_dtype=kv_dtype), CPU).backend
    one = Sequence("s", 0, [0] * context, context, 1, SamplingParams(), blocks=[5, 2, 7, 0])
    parts = []
    for begin, end in ((0, half), (half, context)):
        attend = Attend(backend, cache, build([Chunk(one, begin, end - begin)], 16, CPU))
        parts.append(attend(0, q[begin:end], k[begin:end], v[begin:end]))
    return torch.cat(parts)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / math.sqrt(q.shape[-1])
    seen = torch.ones(len(q), len(k)).tril().bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v.double()).flatten(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.model(11, hidden_size=64, intermediate_size=64, head_dim=16)
    return tiny.write_directory(made, tmp_path_factory.mktemp("tiny"))


def engine(kv_dtype: str, attention: str = "batched") -> EngineConfig:
    return EngineConfig.model_validate(
        {"device": "cpu", "dtype": "float32", "blocks": 16, "kv_dtype": kv_dtype, "attention": attention}
    )


PROMPT = [(7 * index * index + 3 * index) % 290 for index in range(70)]
TABLE = [5, 2, 9, 0, 12]


@BOTH
@pytest.mark.parametrize("attention", ["batched", "reference"])
def test_logits_move_a_little_and_not_with_the_chunks(held: KvFormat, attention: str, source: Path) -> None:
    """A step reads its own keys as the later ones do: rounded. The rest is fp32's order of sums."""
    exact = logits_of(load(source, engine("auto", attention)), PROMPT, [70], TABLE)
    model = load(source, engine(held.name, attention))
    whole = logits_of(model, PROMPT, [70], TABLE)
    parts = logits_of(model, PROMPT, [1, 9, 30, 31, 64, 70], TABLE)
    moved = ((whole - exact).norm() / exact.norm()).item()
    assert 1e-4 < moved <= {"int8": 0.02, "fp8": 0.1}[held.name]
    assert ((parts - whole).norm() / exact.norm()).item() <= 0.1 * moved


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_the_plan_and_the_figures_follow(kv_dtype: str, source: Path) -> None:
    """``kv_cache`` bytes hold more blocks; what the worker tells is what it has."""
    whole, half = (
        load(source, EngineConfig(device="cpu", kv_cache=2**20, dtype="bfloat16", attention="batched", kv_dtype=name))
        for name in ("auto", kv_dtype)
    )
    assert half.kv_bytes_per_token == kv_bytes_per_token(2, 2, 16, 2, kv_dtype) == 2 * 2 * 2 * 18
    assert (whole.kv_dtype, half.kv_dtype) == ("bfloat16", kv_dtype)
    assert f"{half.kv_bytes_per_token} bytes, {kv_dtype}" in half.table
    assert half.blocks == 2**20 // (16 * half.kv_bytes_per_token) > 1.7 * whole.blocks
    assert half.runner.cache.data.nbytes == half.blocks * 16 * half.kv_bytes_per_token == half.budget.kv


def test_who_was_preempted_in_the_same_bytes_is_not(source: Path) -> None:
    """What the technique is for."""
    preempted = {}
    for kv_dtype in ("auto", "int8"):
        settings = {"device": "cpu", "dtype": "float32", "kv_cache": 11 * 16 * 512, "kv_dtype": kv_dtype, "threads": 1}
        bench = Bench(source, EngineConfig.model_validate(settings))
        requests = [Generate(f"r{number}", [number, *range(40, 70)], 40, GREEDY) for number in range(6)]
        assert all(len(one.tokens) == 40 for one in bench.run(requests))
        preempted[kv_dtype] = bench.preemptions
    assert preempted["auto"] > 0
    assert preempted["int8"] == 0


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_kernels_that_read_pages_by_themselves_say_why_not(name: str) -> None:
    """The reason is asked of the class: neither library is needed here for that."""
    shape = AttentionShape(4, 2, 64, torch.bfloat16, "int8")
    assert as_computed_only(shape) == "kv_dtype=int8 is read by native, batched and reference"
    assert as_computed_only(AttentionShape(4, 2, 64, torch.bfloat16)) is None
    module = importlib.import_module(f"workers.model.attention.paged_{name}")
    made = {"triton": "TritonAttention", "flashinfer": "FlashInferAttention"}[name]
    assert getattr(module, made).unsupported(shape, torch.device("cuda")) == as_computed_only(shape)
