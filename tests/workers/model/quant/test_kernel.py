"""The native step on quantised weights: the same bits as on the weights that they stand for, on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kernels
from tests.workers.model import tiny
from tests.workers.model.native.test_kernel import ids, table
from tests.workers.model.quant.formats import FORMATS, Rounded, kernel_of

SHAPES: dict[str, dict[str, Any]] = {
    "square": {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
    "two supers and a bit": {"hidden_size": 64, "intermediate_size": 528, "head_dim": 16, "vocab_size": 301},
}


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.model(3, max_position_embeddings=4096, tie_word_embeddings=False, **SHAPES[request.param])
    return tiny.write_directory(made, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_the_dequantised_weights_bit_for_bit(directory: Path, name: str, dtype: torch.dtype) -> None:
    """At one row, at a full tile, and at so many that panels are unpacked whole; in any chunks and threads."""
    tokens, blocks = ids(90), table(90, 3)
    plain = kernel_of(directory, dtype, Rounded(FORMATS[name], dense=True)).run((tokens, 0, blocks))
    rounded = Rounded(FORMATS[name])
    kernel = kernel_of(directory, dtype, rounded)
    projections = {f"{letter}_proj" for letter in ("q", "k", "v", "o", "gate", "up", "down")}
    assert rounded.names == projections | {"embed_tokens", "lm_head"}
    assert torch.equal(kernel.run((tokens, 0, blocks)), plain)
    sizes = (1, 12, 13, 7, 40, 2, 15)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    for threads in (1, 3):
        kernel = kernel_of(directory, dtype, Rounded(FORMATS[name]), threads)
        parts = [kernel.run((tokens[:end], end - size, blocks)) for size, end in zip(sizes, ends, strict=True)]
        assert torch.equal(torch.cat(parts), plain)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_narrower_machines_unpack_the_same_weights(isa: str, tmp_path: Path) -> None:
    """AVX2 and plain C++, each in a process of its own: bit for bit as dense weights there, and near the wide ones."""
    made = tiny.model(3, max_position_embeddings=4096, **SHAPES["two supers and a bit"])
    directory = tiny.write_directory(made, tmp_path / "model")
    script = f"""
import torch
from pathlib import Path
from tests.workers.model.native.test_kernel import ids, table
from tests.workers.model.quant.formats import FORMATS, Rounded, kernel_of
for dtype in (torch.float32, torch.bfloat16):
    for name, quantise in FORMATS.items():
        kernels = [kernel_of(Path({str(directory)!r}), dtype, Rounded(quantise, dense)) for dense in (True, False)]
        runs = [kernel.run((ids(30), 0, table(30, 1))) for kernel in kernels]
        assert torch.equal(*runs), (dtype, name)
        torch.save(runs[1], {str(tmp_path)!r} + f"/{{name}}-{{dtype}}.pt")
"""
    env = {**os.environ, **kernels.FORMS[isa]}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stderr
    for name, quantise in FORMATS.items():
        wide = kernel_of(directory, torch.float32, Rounded(quantise)).run((ids(30), 0, table(30, 1)))
        torch.testing.assert_close(torch.load(tmp_path / f"{name}-torch.float32.pt"), wide, rtol=2e-4, atol=2e-4)
