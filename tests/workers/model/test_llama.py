"""The decoder on random weights against transformers, in shapes that the bundled model does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.workers.model import harness, tiny
from workers.config import EngineConfig
from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence
from workers.model import weights
from workers.model.attention import Attend
from workers.model.batch import build
from workers.model.loading import LoadedModel, load
from workers.model_store import ModelStoreError
from workers.protocol import SamplingParams

ENGINE = EngineConfig(device="cpu", dtype="float32", blocks=16, block_size=4)
PROMPT = [(7 * index * index + 3 * index) % 290 for index in range(23)]


def logits_of(model: LoadedModel, splits: list[int]) -> torch.Tensor:
    """Logits of every row of PROMPT [rows, vocab], computed in chunks that end at ``splits``."""
    one = Sequence("s", 0, list(PROMPT), len(PROMPT), 1, SamplingParams(), blocks=[5, 2, 9, 0, 12, 7])
    found, start = [], 0
    with torch.inference_mode():
        for end in splits:
            batch = build([Chunk(one, start, end - start)], 4, torch.device("cpu"))
            attend = Attend(model.runner.attention, model.runner.cache, batch)
            found.append(model.runner.decoder(batch.tokens, batch.positions, attend, torch.arange(end - start)))
            start = end
    return torch.cat(found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 10},
        {"hidden_size": 40, "head_dim": 16, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1000.0,
            }
        },
    ],
    ids=["plain", "untied", "no-groups", "12-over-2", "odd-sizes", "rope-linear", "rope-llama3"],
)
@pytest.mark.parametrize("attention", ["reference", "batched"])
def test_logits_equal_transformers(tmp_path: Path, attention: str, changes: dict[str, Any]) -> None:
    made = tiny.model(seed=4, **changes)
    with torch.no_grad():
        expected = made(input_ids=torch.tensor([PROMPT])).logits[0]
    engine = ENGINE.model_copy(update={"attention": attention})
    model = load(tiny.write_directory(made, tmp_path / "m"), engine, cache=tmp_path / "cache")
    assert expected.std() > 0.3  # logits that are all alike would prove nothing
    for splits in ([23], [1, 2, 9, 23], list(range(1, 24))):
        torch.testing.assert_close(logits_of(model, splits), expected, atol=2e-4, rtol=1e-4)


def test_gguf_equals_safetensors(tmp_path: Path) -> None:
    """Unpacked and read straight: bit-equal logits, the same revision and tokenizer; quantised too."""
    made = tiny.model(seed=6, hidden_size=64, intermediate_size=96, head_dim=16)
    for quantise in (False, True):
        path = tiny.write_gguf(made, tmp_path / f"{quantise}.gguf", quantise=quantise)
        unpacked = load(path, ENGINE, cache=tmp_path / "cache")
        straight = load(path, ENGINE, cache=tmp_path / "other", straight=True)
        assert torch.equal(logits_of(unpacked, [23]), logits_of(straight, [23]))
        assert (unpacked.revision, unpacked.tokenizer_sha256) == (straight.revision, straight.tokenizer_sha256)
        assert (unpacked.config, unpacked.eos_ids) == (straight.config, frozenset({2, 0}))
        assert not list((tmp_path / "other").glob("models/*"))


def test_gguf_of_bf16_weights_equals_the_original_directory(tmp_path: Path) -> None:
    made = tiny.model(seed=7).to(torch.bfloat16).float()
    direct = load(tiny.write_directory(made, tmp_path / "m"), ENGINE, cache=tmp_path / "cache")
    through = load(tiny.write_gguf(made, tmp_path / "m.gguf"), ENGINE, cache=tmp_path / "cache")
    assert torch.equal(logits_of(direct, [23]), logits_of(through, [23]))


def test_sharded_weights(tmp_path: Path) -> None:
    made = tiny.model(seed=8)
    made.save_pretrained(tmp_path / "m", max_shard_size="40KB")
    folder = tiny.write_directory(tiny.model(seed=8), tmp_path / "whole")
    (tmp_path / "m" / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    sharded, whole = (load(path, ENGINE, cache=tmp_path / "cache") for path in (tmp_path / "m", folder))
    assert torch.equal(logits_of(sharded, [23]), logits_of(whole, [23]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept.pop("model.norm.weight"), "lack 'model.norm.weight'"),
        (lambda kept: kept.update({"model.extra.weight": torch.ones(2)}), "no place .* 'model.extra.weight'"),
        (
            lambda kept: kept.update({"model.norm.weight": torch.ones(31)}),
            r"'model.norm.weight' has shape \[31\], config.json says \[32\]",
        ),
        (lambda kept: kept.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "has type torch.int8"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    folder = tiny.write_directory(tiny.model(), tmp_path / "m")
    kept = load_file(folder / "model.safetensors")
    change(kept)
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ModelStoreError, match=message):
        load(folder, ENGINE, cache=tmp_path / "cache")


def test_a_file_that_is_mapped_anew_in_between_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write_directory(tiny.model(seed=8, hidden_size=64, head_dim=16), tmp_path / "m")
    whole = logits_of(load(folder, ENGINE), [23])
    monkeypatch.setattr(weights, "REOPEN_BYTES", 5000)
    opened: list[Path] = []
    monkeypatch.setattr(weights, "safe_open", lambda path, **how: opened.append(path) or safe_open(path, **how))
    assert torch.equal(logits_of(load(folder, ENGINE), [23]), whole)
    assert len(opened) > 3


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_weights_outlive_the_file(tmp_path: Path, attention: str) -> None:
    """Whatever the loader read from the mapped file, the model keeps none of it: the file may be replaced."""
    folder = tiny.write_directory(tiny.model(seed=8, hidden_size=64, head_dim=16), tmp_path / "m")
    engine = ENGINE.model_copy(update={"attention": attention, "block_size": 16})
    model = load(folder, engine)
    before = harness.logits_of(model, PROMPT, [23], [1, 2])
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(harness.logits_of(model, PROMPT, [23], [1, 2]), before)


def test_damaged_safetensors_are_named(tmp_path: Path) -> None:
    folder = tiny.write_directory(tiny.model(), tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelStoreError, match="not a readable safetensors file"):
        load(folder, ENGINE, cache=tmp_path / "cache")
