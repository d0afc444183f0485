"""Blocks kept as they lie stand for exactly what dequantising the file gives."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from tests.workers.model import tiny
from tests.workers.model.harness import logits_of
from workers.config import EngineConfig
from workers.model.loading import LoadedModel, load
from workers.model.quant.gguf_blocks import KEPT, kept, quantised_bytes
from workers.model_store import ModelStoreError

ROWS, COLUMNS = 24, 512
TOKENS = [(7 * index * index + 3 * index) % 290 for index in range(60)]


def blocks(kind: str) -> np.ndarray:
    """What a file of that type holds: real weights, or, where nothing here quantises so, random codes and scales."""
    random = np.random.default_rng(3)
    if kind != "Q4_K":
        return quantize(random.standard_normal((ROWS, COLUMNS)).astype(np.float32), gguf.GGMLQuantizationType[kind])
    made = random.integers(0, 256, (ROWS, COLUMNS // 256, 144), dtype=np.uint8)
    made[..., :4] = random.uniform(1e-4, 2e-3, (ROWS, COLUMNS // 256, 2)).astype(np.float16).view(np.uint8)
    return made.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", KEPT)
def test_kept_blocks_are_what_dequantising_gives(kind: str) -> None:
    data = blocks(kind)
    truth = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[kind])).to(torch.bfloat16)
    made = kept(kind, data, ROWS, COLUMNS)
    assert made is not None
    assert torch.equal(made.dense(), truth)
    assert made.nbytes == quantised_bytes(kind, ROWS, COLUMNS)
    assert len(set(truth.flatten().tolist())) > 50


def test_what_has_no_kernel_or_no_finite_scale_is_left_to_dequantising() -> None:
    assert kept("Q6_K", np.zeros((4, 420), np.uint8), 4, 512) is None
    assert kept("F16", np.zeros((4, 512), np.float16), 4, 512) is None
    assert quantised_bytes("Q6_K", 4, 512) is None
    assert quantised_bytes("Q4_K", 4, 288) is None
    data = blocks("Q8_0").copy()
    data[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    assert kept("Q8_0", data, ROWS, COLUMNS) is None


def model(source: Path, cache: Path, **settings: object) -> LoadedModel:
    base = {"device": "cpu", "dtype": "float32", "blocks": 16, "threads": 1}
    return load(source, EngineConfig.model_validate({**base, **settings}), cache=cache)


@pytest.mark.parametrize("attention", ["native", "batched"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_kept_as_it_is_gives_the_same_bits(attention: str, dtype: str, tmp_path: Path) -> None:
    """``weight_dtype: gguf`` is exact: the logits are those of the unpacked model, with about half the bytes."""
    made = tiny.model(3, hidden_size=64, intermediate_size=96, head_dim=16, tie_word_embeddings=False)
    path = tiny.write_gguf(made, tmp_path / "m.gguf", quantise=True)
    plain = model(path, tmp_path, attention=attention, dtype=dtype)
    found = model(path, tmp_path, attention=attention, dtype=dtype, weight_dtype="gguf")
    table = list(range(4))
    assert torch.equal(logits_of(found, TOKENS, [60], table), logits_of(plain, TOKENS, [60], table))
    assert found.weight_bytes < (0.3 if dtype == "float32" else 0.6) * plain.weight_bytes
    assert (found.weight_dtype, found.revision) == ("gguf", plain.revision)
    straight = load(
        path,
        EngineConfig(device="cpu", dtype=dtype, blocks=16, attention=attention, weight_dtype="gguf"),
        cache=tmp_path,
        straight=True,
    )
    assert straight.weight_bytes == found.weight_bytes
    if attention == "batched" and dtype == "float32":
        assert found.budget.weights == found.weight_bytes


def test_a_model_without_such_a_file_says_what_to_do(tmp_path: Path) -> None:
    made = tiny.model(3, hidden_size=64, intermediate_size=96, head_dim=16)
    folder = tiny.write_directory(made, tmp_path / "dir")
    with pytest.raises(ModelStoreError, match=r"weight_dtype=gguf .*dir came in none; use int8, int4 or auto"):
        model(folder, tmp_path, weight_dtype="gguf")
    plain = tiny.write_gguf(made, tmp_path / "plain.gguf")
    with pytest.raises(ValueError, match=r"no matrix of a type that is kept \(Q8_0, .*\); use int8, int4 or auto"):
        model(plain, tmp_path, weight_dtype="gguf")


def test_a_file_that_was_unpacked_before_it_was_kept_or_has_changed_is_not_used(tmp_path: Path) -> None:
    made = tiny.model(3, hidden_size=64, intermediate_size=96, head_dim=16)
    path = tiny.write_gguf(made, tmp_path / "m.gguf", quantise=True)
    model(path, tmp_path)
    (unpacked,) = (one for one in (tmp_path / "models").iterdir() if one.is_dir())
    with pytest.raises(ModelStoreError, match="unpacked before such files were kept: remove it and start again"):
        model(unpacked, tmp_path, weight_dtype="gguf")
    (unpacked / "model.gguf").write_bytes(path.read_bytes())
    assert model(unpacked, tmp_path, weight_dtype="gguf").weight_dtype == "gguf"
    (unpacked / "model.gguf").write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ModelStoreError, match="has changed since it was unpacked"):
        model(unpacked, tmp_path, weight_dtype="gguf")
