"""Which attention backend is taken, and FlashInfer's page tables (its kernels need a GPU)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from workers.model.attention import AttentionShape, base, choose
from workers.model.attention.paged_flashinfer import FlashInferAttention, Pages

HALF = AttentionShape(8, 2, 64, torch.bfloat16)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_auto_on_a_cpu_is_torch() -> None:
    assert choose("auto", HALF, CPU).backend.name == "batched"


def test_auto_on_cuda_takes_triton_where_flashinfer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    chosen = choose("auto", HALF, CUDA)
    assert chosen.backend.name == "triton"
    assert chosen.passed_over == ("flashinfer: flashinfer is not installed (pip install 'forebay[gpu]')",)


def test_auto_without_either_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.BACKENDS, "triton", "workers.no_such_module:X")
    monkeypatch.setitem(base.BACKENDS, "flashinfer", "workers.no_such_module:X")
    chosen = choose("auto", HALF, CUDA)
    assert chosen.backend.name == "batched"
    assert [reason.split(":")[0] for reason in chosen.passed_over] == ["flashinfer", "triton"]


def test_a_library_that_does_not_load_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    chosen = choose("auto", HALF, CUDA)
    assert chosen.backend.name == "triton"
    assert chosen.passed_over == ("flashinfer: does not load: libcuda.so.1: cannot open shared object file",)


@pytest.mark.parametrize(
    ("shape", "device", "why"),
    [
        (HALF, CPU, "device cpu is no CUDA device"),
        (AttentionShape(8, 2, 64), CUDA, "dtype torch.float32 is neither"),
        (AttentionShape(8, 2, 48, torch.float16), CUDA, "head_dim=48 is none of 64, 128, 256"),
        (HALF, CUDA, None),
    ],
)
def test_what_flashinfer_cannot_run(shape: AttentionShape, device: torch.device, why: str | None) -> None:
    found = FlashInferAttention.unsupported(shape, device)
    assert found is None if why is None else str(found).startswith(why)


def test_pages_hold_exactly_the_context() -> None:
    contexts = [1, 4, 5, 8, 9]
    tables = [[7, 9], [3], [2, 5, 6], [8, 0], [1, 4, 10]]
    made = Pages.of(tables, contexts, 4)
    assert made.borders.tolist() == [0, 1, 2, 4, 6, 9]
    assert made.pages.tolist() == [7, 3, 2, 5, 8, 0, 1, 4, 10]
    assert made.last.tolist() == [1, 4, 1, 4, 1]
    assert {part.dtype for part in (made.borders, made.pages, made.last)} == {torch.int32}
