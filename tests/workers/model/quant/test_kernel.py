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
from tests.workers.model.native.by_hand import Kernel, ids, table
from tests.workers.model.quant import head
from tests.workers.model.quant.formats import EXACT, FORMATS, Rounded, kernel_of

SHAPES: dict[str, dict[str, Any]] = {
    "square": {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
    "two supers and a bit": {"hidden_size": 64, "intermediate_size": 528, "head_dim": 16, "vocab_size": 301},
}


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.model(3, max_position_embeddings=4096, tie_word_embeddings=False, **SHAPES[request.param])
    return tiny.write_directory(made, tmp_path_factory.mktemp("model"))


SIZES = (1, 12, 13, 7, 40, 2, 15)


def in_parts(kernel: Kernel, tokens: list[int]) -> torch.Tensor:
    """Logits of 90 tokens that come in chunks: of one row, of a full tile, of more."""
    ends = [sum(SIZES[: i + 1]) for i in range(len(SIZES))]
    blocks = table(90, 3)
    return torch.cat([kernel.run((tokens[:end], end - size, blocks)) for size, end in zip(SIZES, ends, strict=True)])


@pytest.mark.parametrize(("name", "dtype"), EXACT)
def test_it_equals_the_dequantised_weights_bit_for_bit(directory: Path, name: str, dtype: torch.dtype) -> None:
    """At one row, at a full tile, and at so many that panels are unpacked whole; in any chunks and threads."""
    tokens, blocks = ids(90), table(90, 3)
    plain = kernel_of(directory, dtype, Rounded(FORMATS[name], dense=True)).run((tokens, 0, blocks))
    rounded = Rounded(FORMATS[name])
    kernel = kernel_of(directory, dtype, rounded)
    projections = {f"{letter}_proj" for letter in ("q", "k", "v", "o", "gate", "up", "down")}
    assert rounded.names == projections | {"embed_tokens", "lm_head"}
    assert torch.equal(kernel.run((tokens, 0, blocks)), plain)
    for threads in (1, 3):
        assert torch.equal(in_parts(kernel_of(directory, dtype, Rounded(FORMATS[name]), threads), tokens), plain)


def test_integers_too_depend_on_their_row_only(directory: Path) -> None:
    """Chunks and threads change no bit; and the dequantised weights, rounded once more, give nearly the same."""
    tokens, blocks = ids(300), table(300, 3)
    whole = kernel_of(directory, torch.bfloat16, Rounded(FORMATS["q8"])).run((tokens, 0, blocks))
    for threads in (1, 3):
        parts = in_parts(kernel_of(directory, torch.bfloat16, Rounded(FORMATS["q8"]), threads), tokens)
        assert torch.equal(parts, whole[:90])
    plain = kernel_of(directory, torch.bfloat16, Rounded(FORMATS["q8"], dense=True)).run((tokens, 0, blocks))
    assert 1e-4 < (whole - plain).norm() / plain.norm() <= 3e-2  # what bfloat16 costs by itself


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_narrower_machines_compute_the_same(isa: str, tmp_path: Path) -> None:
    """AVX2 and plain C++, each in a process of its own: bit for bit as dense weights there, and near the wide ones.
    Where codes are multiplied as integers, bit for bit as here."""
    made = tiny.model(3, max_position_embeddings=4096, **SHAPES["two supers and a bit"])
    directory = tiny.write_directory(made, tmp_path / "model")
    script = f"""
import torch
from pathlib import Path
from tests.workers.model.native.by_hand import ids, table
from tests.workers.model.quant import head
from tests.workers.model.quant.formats import EXACT, FORMATS, Rounded, kernel_of
for name, dtype in EXACT:
    kernels = [kernel_of(Path({str(directory)!r}), dtype, Rounded(FORMATS[name], dense)) for dense in (True, False)]
    runs = [kernel.run((ids(30), 0, table(30, 1))) for kernel in kernels]
    assert torch.equal(*runs), (dtype, name)
    torch.save(runs[1], {str(tmp_path)!r} + f"/{{name}}-{{dtype}}.pt")
torch.save(head.outputs(Path({str(tmp_path)!r})), {str(tmp_path)!r} + "/head.pt")
"""
    for case, scales in head.SCALES.items():
        head.write(tmp_path / case, scales)
    env = {**os.environ, **kernels.FORMS[isa]}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stderr
    for name, quantise in FORMATS.items():
        wide = kernel_of(directory, torch.float32, Rounded(quantise)).run((ids(30), 0, table(30, 1)))
        torch.testing.assert_close(torch.load(tmp_path / f"{name}-torch.float32.pt"), wide, rtol=2e-4, atol=2e-4)
    here, there = head.outputs(tmp_path), torch.load(tmp_path / "head.pt")
    assert all(torch.equal(here[case], there[case]) for case in head.SCALES)
