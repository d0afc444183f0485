"""GGUF files that are cut off, damaged or contradict themselves: an error that names the file, whatever they say."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.workers.model import tiny
from workers.model.config import parse_config
from workers.model.gguf_tokenizer import tokenizer_config_of, tokenizer_json_of
from workers.model.gguf_unpack import GgufModel, unpack
from workers.model.weights import GgufSource
from workers.model_store import ModelStoreError

ODD: list[Any] = [None, True, "x", "", -1, 0, 1, 3, 1.5, 2**40, float("nan"), [], ["x"], [1, 2], b"x"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.model(hidden_size=64, intermediate_size=96, head_dim=16)
    return tiny.write_gguf(made, tmp_path_factory.mktemp("gguf") / "tiny.gguf", quantise=True)


def everything(path: Path, folder: Path) -> None:
    """Read it in both ways. Raises ModelStoreError."""
    unpack(path, folder, None)
    source = GgufSource(GgufModel(path))
    for name in source.names():
        source.quantised(name)


def test_cut_off_anywhere(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    pick = Random(0)
    ends = sorted({0, 3, 4, 8, 16, 23, 24, len(whole) - 1, *(pick.randrange(len(whole)) for _ in range(60))})
    for end in ends:
        cut.write_bytes(whole[:end])
        with pytest.raises(ModelStoreError, match=r"cut\.gguf"):
            everything(cut, tmp_path)


def test_any_byte_of_its_head_may_be_another(file: Path, tmp_path: Path) -> None:
    """It is refused, or read: then what is wrong is in its texts or weights."""
    whole = file.read_bytes()
    head = whole.index(b"token_embd.weight") + 200
    other = tmp_path / "other.gguf"
    pick = Random(1)
    read = 0
    for _ in range(250):
        place = pick.randrange(head)
        other.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << pick.randrange(8))]) + whole[place + 1 :])
        try:
            everything(other, tmp_path)
        except ModelStoreError:
            continue
        read += 1
    assert 0 < read < 250


def test_every_figure_may_be_anything(file: Path, tmp_path: Path) -> None:
    names = sorted(GgufModel(file).metadata)
    assert len(names) > 15
    for name in names:
        for odd in ODD:
            model = GgufModel(file)
            model.metadata[name] = odd
            try:
                config = parse_config(model.config(), {}, str(file))
                tokenizer_json_of(model.metadata)
            except ModelStoreError:
                continue
            assert config.heads > 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.head_count", [4, 4], r"tiny\.gguf: llama: attention\.head_count=\[4, 4\] must be a positive"),
        ("llama.attention.head_count", 0, r"attention\.head_count=0 must be a positive whole number"),
        ("llama.attention.head_count", 5, r"'model\.layers\.0\.self_attn\.q_proj\.weight' has 64 rows, which 5 heads"),
        ("llama.attention.layer_norm_rms_epsilon", "x", "layer_norm_rms_epsilon='x' must be a positive number"),
        ("tokenizer.ggml.tokens", 3, "lacks tokenizer.ggml.tokens"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges is no list of texts"),
        ("tokenizer.ggml.token_type", [1], "tokenizer.ggml.token_type has 1 entries for 300 tokens"),
        ("tokenizer.ggml.eos_token_id", 300, "eos_token_id=300 is no id of 300 tokens"),
    ],
)
def test_what_cannot_be_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    real = GgufModel.__init__

    def lying(model: GgufModel, path: Path) -> None:
        real(model, path)
        model.metadata[key] = value
        model._heads = model._size("attention.head_count")

    monkeypatch.setattr(GgufModel, "__init__", lying)
    with pytest.raises(ModelStoreError, match=message):
        unpack(file, tmp_path, None)


@pytest.mark.parametrize(
    ("kind", "pre", "told", "begins"),
    [
        ("gpt2", "smollm", None, False),
        ("gpt2", "llama-bpe", None, True),
        ("gpt2", "llama-bpe", False, False),
        ("gpt2", "qwen2", True, True),
        ("llama", "default", None, True),
        ("llama", "default", False, False),
    ],
)
def test_a_begin_token_where_the_file_does_not_say(
    file: Path, kind: str, pre: str, told: bool | None, begins: bool
) -> None:
    """Files of Llama 3 do not: its published tokenizer does it by other means."""
    metadata = {**GgufModel(file).metadata, "tokenizer.ggml.model": kind, "tokenizer.ggml.pre": pre}
    if told is not None:
        metadata["tokenizer.ggml.add_bos_token"] = told
    assert json.loads(tokenizer_config_of(metadata))["add_bos_token"] is begins


def test_one_of_several_parts_is_refused(tmp_path: Path) -> None:
    """Its weights are not whole, which nobody would understand by the name of the first that is missing."""
    file = tiny.write_gguf(tiny.model(), tmp_path / "part.gguf", split__count="3")
    with pytest.raises(ModelStoreError, match=r"part\.gguf is one of 3 parts; join them first"):
        unpack(file, tmp_path, None)


def test_the_file_itself_is_fine(file: Path, tmp_path: Path) -> None:
    everything(file, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_attention_heads"] == 4
