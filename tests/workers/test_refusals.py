"""A worker that will not start says which key of the YAML is wrong, its value, and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.workers import tiny_model
from workers.config import EngineConfig
from workers.launchers.base import LaunchContext, LaunchError, WorkerSpec
from workers.launchers.local import LocalLauncher, spec_line
from workers.main import load_model
from workers.options import WorkerOptions, from_line

MODEL = "models[odd.pools[0]]"
PLACE = f"{MODEL}.pools[local]"
HOST = {"kind": "host", "size": "1MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name, special in (("model", ()), ("other", ("<|more|>",)), ("mamba", ())):
        (made / name).mkdir()
        tiny_model.write(made / name, special=special)
    config = json.loads((made / "mamba" / "config.json").read_text())
    (made / "mamba" / "config.json").write_text(json.dumps({**config, "layers_block_type": ["mamba"]}))
    return made


def refused(folder: Path, engine: dict[str, Any], source: str = "model") -> str:
    """What the operator reads."""
    spec = WorkerSpec(
        "w", 0, "m", source, EngineConfig(**{"device": "cpu", **engine}), base_dir=str(folder), place=PLACE
    )
    options = from_line(spec_line(spec, "unix:/w", "s" * 16, None))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what this is about
        load_model(options)
    return options.placed(caught.value)


@pytest.mark.parametrize(
    ("engine", "key", "remedy"),
    [
        ({"kv_cache": 1000}, "kv_cache=1000", "bytes or more"),
        ({"kv_cache": 2**62}, "kv_cache", "lower it"),
        ({"max_context": 9999}, "max_context=9999", "lower it or leave it out"),
        ({"device": "cuda:99"}, "device=cuda:99", "write auto or cpu"),
        ({"attention": "triton"}, "attention=triton", "auto takes what runs"),
        ({"tiers": [{**HOST, "size": 100}]}, "tiers[0].size=100", "bytes or more"),
        ({"tiers": [HOST, {"kind": "disk", "path": "kv", "size": 10}]}, "tiers[1].size=10", "give it that or more"),
        (
            {"tiers": [HOST, {"kind": "disk", "path": "model/config.json", "size": "1MiB"}]},
            "tiers[1].path",
            "name a folder that can be written",
        ),
        ({"speculation": {"method": "draft", "draft_model": "gone"}}, "speculation.draft_model=gone", "write pypi:"),
        (
            {"speculation": {"method": "draft", "draft_model": "other"}},
            "speculation.draft_model=other",
            "name a smaller model of the same family",
        ),
        ({"adapters": [{"name": "law", "source": "gone"}]}, "adapters[0] (law)", "gone"),
        ({"weight_dtype": "gguf"}, "weight_dtype=gguf", "use int8, int4 or auto"),
        ({"tensor_parallel": 3}, "tensor_parallel=3", "can be split by 1, 2"),
        ({"pipeline_parallel": 5}, "pipeline_parallel=5", "write 1 or less"),
        ({"tensor_parallel": 2, "expert_parallel": True}, "expert_parallel=true", "leave it out"),
    ],
    ids=lambda value: re.sub(r"\W+", "_", value) if isinstance(value, str) else "",
)
def test_a_setting_that_cannot_be_is_named_where_it_stands(
    folder: Path, engine: dict[str, Any], key: str, remedy: str
) -> None:
    said = refused(folder, engine)
    assert said.startswith(f"{PLACE}.engine.{key}")
    assert remedy in said


@pytest.mark.parametrize(("source", "words"), [("gone", "does not exist"), ("mamba", "keeps state other than keys")])
def test_a_model_that_cannot_be_read_is_its_source(folder: Path, source: str, words: str) -> None:
    said = refused(folder, {}, source)
    assert said.startswith(f"{MODEL}.source: ")
    assert words in said


def test_a_worker_that_nobodys_file_describes_names_its_own_options() -> None:
    options = WorkerOptions(address="unix:/w")
    assert options.placed(ValueError("engine.blocks=1")) == "engine.blocks=1"
    assert options.model_copy(update={"place": PLACE}).placed(OSError("port 1 is taken")) == "port 1 is taken"


async def test_an_allocator_that_is_not_there_is_named_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host.LIBRARY_DIRS", ())
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    spec = WorkerSpec("w", 0, "m", "model", EngineConfig(allocator="jemalloc"), place=PLACE)
    with pytest.raises(LaunchError, match=re.escape(f"{PLACE}.engine.allocator=jemalloc: ")):
        await LocalLauncher(LaunchContext()).start(spec)
