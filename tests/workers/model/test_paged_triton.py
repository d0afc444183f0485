"""Our Triton kernel in Triton's interpreter, which wants its variable before the import: so in a child process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.workers.model.test_config import FIELDS
from workers.model.attention import AttentionShape, choose, paged_triton
from workers.model.config import parse_config
from workers.model.kv_cache import KvCache

LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a program may use on the smallest of the GPUs since Ampere."""
POINTERS = ("queries", "output", "keys", "values")
INTEGERS = ("tables", "starts", "counts", "contexts", "tile_sequence", "tile_row")


def test_the_kernel_in_the_interpreter() -> None:
    suite = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(suite)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 20


@pytest.mark.parametrize(
    ("kind", "rows", "dim", "group", "arch"),
    [("bf16", 16, 64, 3, 90), ("bf16", 64, 128, 8, 80), ("bf16", 32, 256, 2, 80), ("fp32", 16, 80, 1, 80)],
)
def test_it_compiles_for_gpus(
    kind: str, rows: int, dim: int, group: int, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, as a worker's start would: that needs no GPU. Its tiles fit the smallest ones' memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"GROUP": group, "DIM": dim, "DIM_PADDED": triton.next_power_of_2(dim), "BLOCK": 16, "ROWS": rows}
    constants |= {"WALK": paged_triton.KEYS, "WIDE": False}
    signature = {
        **dict.fromkeys(POINTERS, f"*{kind}"),
        **dict.fromkeys(INTEGERS, "*i64"),
        "table_width": "i32",
        "scale": "fp32",
        **dict.fromkeys(("query_stride", "output_stride", "slot_stride"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(fn=paged_triton._attend, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert len(made.asm["cubin"]) > 10_000
    assert made.metadata.shared <= LEAST_SHARED


def test_recorded_steps_have_their_tables_in_the_same_memory() -> None:
    """One is replayed at a time; of a context of 131,072 tokens each would take up to 16 MiB, and there are 35."""
    kernel = paged_triton.TritonAttention(AttentionShape(4, 2, 16))
    cache = KvCache(parse_config(FIELDS, {}, "config.json"), 4, 16, torch.float32, torch.device("cpu"), scratch=True)
    large, small = kernel.hold(8, 5, cache), kernel.hold(2, 5, cache)
    assert small.tables.shape == (2, 5)
    assert small.tables.data_ptr() == large.tables.data_ptr()
    small.refill(np.array([[3], [4]]), np.array([1, 2]))
    assert small.tables[:, 0].tolist() == [3, 4]
    assert small.contexts.tolist() == [1, 2]
    assert large.contexts.tolist() == [1] * 8, "what is small is each one's own"


def test_without_a_gpu_or_the_interpreter_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.attention=triton cannot be used \(triton: device cpu"):
        choose("triton", AttentionShape(4, 2, 16), torch.device("cpu"))
