"""What doctor says of the native kernel: without a compiler, not built yet, built, damaged, and of another world."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import checks
from tests import kernels
from workers.model.native import build


@pytest.fixture(scope="module")
def avx2() -> Path:
    """The kernel for AVX2, out of the cache that all tests share."""
    with kernels.form("avx2"):
        return build.library()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and nothing remembered of another."""
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path))
    build.load.cache_clear()


def kernel() -> tuple[str, str]:
    """Status and detail of the line about the kernel."""
    found = {finding.what: finding for finding in checks.compiler()}
    return found["native kernel"].status, found["native kernel"].detail


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert kernel() == ("note", "cannot be built without a compiler; PyTorch is used, slower on a CPU")


def test_without_a_compiler_one_that_was_built_is_found(
    avx2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernels.form("avx2"):
        place = tmp_path / "kernels" / avx2.name
        place.parent.mkdir()
        shutil.copy(avx2, place)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
        assert kernel() == ("ok", f"avx2 (-march=x86-64-v3 -O0), {place}")


def test_before_and_after_it_is_built(avx2: Path, tmp_path: Path) -> None:
    with kernels.form("avx2"):
        status, detail = kernel()
        assert (status, detail.split(":")[0]) == ("note", "not built yet (-march=x86-64-v3 -O0)")
        assert not list(tmp_path.rglob("*.so"))  # looking builds nothing
        cxx = build.compiler()
        assert cxx is not None
        place = build.place_of(cxx)
        place.parent.mkdir(parents=True)
        shutil.copy(avx2, place)
        assert kernel() == ("ok", f"avx2 (-march=x86-64-v3 -O0), {place}")


def test_a_damaged_kernel_will_be_built_anew(avx2: Path) -> None:
    """It is not even tried: mapping what was cut off would end the process."""
    with kernels.form("avx2"):
        cxx = build.compiler()
        assert cxx is not None
        place = build.place_of(cxx)
        place.parent.mkdir(parents=True)
        content = avx2.read_bytes()
        place.write_bytes(content[: len(content) // 2])
        status, detail = kernel()
    assert (status, detail.split(":")[0]) == ("note", "damaged (-march=x86-64-v3 -O0)")


def test_a_kernel_that_does_not_load_fails_and_names_the_file() -> None:
    """Whole, as its digest says, and yet nothing that this system can load."""
    cxx = build.compiler()
    assert cxx is not None
    place = build.place_of(cxx)
    place.parent.mkdir(parents=True)
    content = b"\x7fELF, of another world"
    place.write_bytes(content + hashlib.sha256(content).digest())
    status, detail = kernel()
    assert status == "fail"
    assert "does not load" in detail
    assert f"remove {place} to have it built anew" in detail


@pytest.mark.parametrize(
    ("there", "status", "detail"),
    [
        ({"triton": "3.8.0"}, "ok", "triton 3.8.0"),
        ({}, "note", "neither flashinfer-python nor triton: attention runs in"),
    ],
)
def test_kernels_for_a_gpu(there: dict[str, str], status: str, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said where PyTorch sees a GPU; the probe is replaced by what such a machine would print."""
    told = {"torch": "2.13.0", "cuda": "13.0", "threads": 2, "gpus": [["a GPU", 2**34]], "mkldnn": True}
    told["between"] = {"gloo": True, "nccl": False}
    monkeypatch.setattr(checks, "_DEVICES", f"print({json.dumps(json.dumps(told))})")
    monkeypatch.setattr(checks, "_installed", there.get)
    found = {finding.what: finding for finding in checks.devices()}
    assert found["device cuda:0"].status == "ok"
    assert (found["several devices"].status, found["several devices"].detail.split(";")[0]) == (
        "ok",
        "torch.distributed: gloo",
    )
    assert found["GPU kernels"].status == status
    assert found["GPU kernels"].detail.startswith(detail)


@pytest.mark.parametrize(
    ("backends", "gpus", "status"),
    [({"gloo": True}, 0, "ok"), ({"gloo": True}, 2, "note"), ({"gloo": True, "nccl": True}, 2, "ok"), ({}, 0, "note")],
)
def test_what_several_devices_would_speak_with(backends: dict[str, bool], gpus: int, status: str) -> None:
    assert checks._between(backends, gpus).status == status


def test_looking_at_the_kernel_loads_no_torch() -> None:
    code = "import sys; from gateway.cli import checks; list(checks.compiler()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
