"""The exported file, read back by the project's own GGUF reader: every weight and every hyperparameter is the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gateway.bench.peers.gguf_export import export
from gateway.bench.report import BenchError
from workers.model.config import read_config
from workers.model.gguf_unpack import GgufModel


@pytest.fixture(scope="module")
def bf16_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in bfloat16."""
    folder = tmp_path_factory.mktemp("bf16")
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model_dir / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("half", [False, True])
def test_weights_are_the_same(bf16_dir: Path, tmp_path: Path, half: bool) -> None:
    path = export(bf16_dir, tmp_path / "deep" / "m.gguf", half=half)
    model = GgufModel(path)
    wanted = load_file(bf16_dir / "model.safetensors")
    assert set(model.shapes()) == set(wanted)
    for name, tensor in wanted.items():
        expected = tensor.to(torch.float16 if half and tensor.ndim > 1 else tensor.dtype).float().numpy()
        assert np.array_equal(model.tensor(name), expected), name
    kinds = {tensor.name: tensor.tensor_type.name for tensor in model._reader.tensors}
    assert kinds["output_norm.weight"] == "F32"
    assert kinds["blk.0.attn_q.weight"] == ("F16" if half else "BF16")


def test_fp32_stays_and_hyperparameters_are_the_same(model_dir: Path, tmp_path: Path) -> None:
    model = GgufModel(export(model_dir, tmp_path / "m.gguf"))
    expected = load_file(model_dir / "model.safetensors")
    assert all(np.array_equal(model.tensor(name), tensor.numpy()) for name, tensor in expected.items())
    ours, theirs = read_config(model_dir), model.config()
    assert theirs["hidden_size"] == ours.hidden
    assert theirs["num_key_value_heads"] == ours.kv_heads
    assert theirs["head_dim"] == ours.head_dim
    assert theirs["rms_norm_eps"] == ours.rms_eps
    assert theirs["rope_theta"] == ours.rope.theta
    assert theirs["vocab_size"] == ours.vocab
    assert theirs["tie_word_embeddings"] is ours.tied


def test_what_is_there_is_left_alone(model_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "m.gguf"
    place.write_text("mine")
    assert export(model_dir, place).read_text() == "mine"


def test_what_gguf_cannot_describe_is_refused(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scaled"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    scaled = {**config, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(scaled))
    with pytest.raises(BenchError, match="linear RoPE"):
        export(folder, tmp_path / "m.gguf")
    (folder / "config.json").unlink()
    with pytest.raises(BenchError, match=r"config\.json"):
        export(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
