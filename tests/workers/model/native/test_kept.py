"""How the kernel keeps keys and values in bytes: its layout read here by hand, against what torch makes of the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.model import tiny
from tests.workers.model.harness import logits_of
from tests.workers.model.native.by_hand import ids
from workers.config import EngineConfig
from workers.model.kv_format import FORMATS
from workers.model.loading import LoadedModel, load
from workers.model.native.decoder import NativeCache
from workers.model.runner import TorchRunner

HEADS, DIM, TABLE, COUNT = 2, 32, [5, 2, 9, 0], 50


def loaded(source: Path, attention: str, kv_dtype: str) -> LoadedModel:
    settings = {"device": "cpu", "dtype": "float32", "blocks": 12, "attention": attention, "kv_dtype": kv_dtype}
    return load(source, EngineConfig.model_validate(settings))


def read(cache: NativeCache, layer: int, element: torch.dtype, table: list[int]) -> tuple[Tensor, Tensor]:
    """Keys and values of a table's slots [tokens, heads, dim], as kept.h says that they lie."""
    parts = cache.data[layer, table].view(len(table), HEADS, 2 * 16 * DIM + 64)
    numbers = parts[..., : 2 * 16 * DIM].contiguous().view(element).float().view(len(table), HEADS, 2, 16 * DIM)
    scales = parts[..., 2 * 16 * DIM :].contiguous().view(torch.bfloat16).float().view(len(table), HEADS, 2, 16, 1)
    keys = numbers[:, :, 0].view(len(table), HEADS, DIM // 2, 16, 2).permute(0, 1, 3, 2, 4).flatten(3)
    values = numbers[:, :, 1].view(len(table), HEADS, 8, DIM, 2).permute(0, 1, 2, 4, 3).flatten(2, 3)
    found = [(part * scales[:, :, which]).transpose(1, 2).flatten(0, 1) for which, part in enumerate((keys, values))]
    return found[0], found[1]


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_it_keeps_what_torch_keeps(kv_dtype: str, tmp_path: Path) -> None:
    """In the first layer, whose inputs are equal but for the last bits of fp32: equal, or the neighbour."""
    made = tiny.model(2, hidden_size=64, intermediate_size=64, head_dim=DIM)
    source = tiny.write_directory(made, tmp_path)
    kernel, torchs = (loaded(source, name, kv_dtype) for name in ("native", "batched"))
    for model in (kernel, torchs):
        logits_of(model, ids(COUNT), [1, 20, COUNT], TABLE)
    assert isinstance(kernel.runner.cache, NativeCache)
    assert isinstance(torchs.runner, TorchRunner)
    assert kernel.kv_bytes_per_token == torchs.kv_bytes_per_token
    slots = torch.tensor([block * 16 + place for block in TABLE for place in range(16)][:COUNT])
    held = FORMATS[kv_dtype]
    pairs = zip(read(kernel.runner.cache, 0, held.element, TABLE), torchs.runner.cache.gather(0, slots), strict=True)
    for found, expected in pairs:
        peak = expected.abs().amax(-1, keepdim=True)
        step = peak / 127 if kv_dtype == "int8" else torch.maximum(expected.abs() / 8, peak / 448 / 512)
        assert bool(((found[:COUNT] - expected).abs() <= 1.02 * step).all())
        assert (found[:COUNT] != expected).float().mean() <= 0.01
