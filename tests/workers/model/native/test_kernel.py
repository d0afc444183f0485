"""The native step against transformers, and its promise that nothing but a row's own past changes a bit of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import kernels
from tests.workers.model import tiny
from tests.workers.model.native.by_hand import BROKEN_KEYS, Kernel, broken, ids, table
from workers.model.native.build import compiler

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "one key head": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16},
    "no groups, wide heads": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 80},
    "twelve on two": {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 16},
    "odd vocabulary": {"hidden_size": 64, "head_dim": 32, "vocab_size": 301, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module", params=SHAPES)
def shaped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made = tiny.model(3, **{"max_position_embeddings": 4096, **SHAPES[request.param]})
    return made, tiny.write_directory(made, tmp_path_factory.mktemp("model"))


def truth(made: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return made(torch.tensor([tokens])).logits[0]


def test_fp32_logits_equal_transformers(shaped: tuple[Any, Path]) -> None:
    made, directory = shaped
    kernel = Kernel(directory)
    for count in (1, 15, 16, 17, 70):
        tokens = ids(count, count)
        torch.testing.assert_close(
            kernel.run((tokens, 0, table(count, count))), truth(made, tokens), rtol=2e-4, atol=2e-4
        )


def test_bf16_logits_stay_close(shaped: tuple[Any, Path]) -> None:
    made, directory = shaped
    tokens = ids(70)
    got, want = Kernel(directory, torch.bfloat16).run((tokens, 0, table(70, 1))), truth(made, tokens)
    assert (got - want).norm() / want.norm() <= 2e-2


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_chunks_batch_placement_and_threads_change_no_bit(shaped: tuple[Any, Path], kv_dtype: str) -> None:
    """engine H5: one logical sequence, any placement and company: bit-equal."""
    _, directory = shaped
    tokens = ids(90)
    for dtype in (torch.float32, torch.bfloat16):
        whole = Kernel(directory, dtype, kv_dtype=kv_dtype).run((tokens, 0, table(90, 1)))
        for threads in (1, 3):
            other = Kernel(directory, dtype, threads, kv_dtype=kv_dtype)
            assert torch.equal(other.run((tokens, 0, table(90, 2))), whole)
        kernel, blocks = Kernel(directory, dtype, blocks=200, kv_dtype=kv_dtype), table(90, 3)
        parts = [kernel.run((tokens[: start + 7], start, blocks)) for start in range(0, 90, 7)]
        assert torch.equal(torch.cat(parts), whole)
        others = [(ids(n, n), 0, list(range(160 + 4 * i, 164 + 4 * i))) for i, n in enumerate((1, 30, 64))]
        together = kernel.run((tokens, 0, blocks), *others)
        assert torch.equal(together[:90], whole)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_a_context_of_several_splits_is_merged_in_order(tmp_path: Path, block: int) -> None:
    made = tiny.model(5, max_position_embeddings=4096, hidden_size=64, head_dim=16)
    directory, tokens = tiny.write_directory(made, tmp_path), ids(2100)
    kernel, blocks = Kernel(directory, block=block), table(2101, 1, block)
    want = truth(made, tokens)
    got = torch.cat([kernel.run((tokens[: start + 700], start, blocks)) for start in range(0, 2100, 700)])
    torch.testing.assert_close(got, want, rtol=5e-4, atol=5e-4)
    decoded = kernel.run((tokens, 2099, blocks))
    assert torch.equal(decoded[0], got[-1])


@pytest.mark.parametrize("factor", [6.0, 60.0])
def test_scores_that_lie_far_apart(tmp_path: Path, factor: float) -> None:
    """What a softmax is relative to moves, within a split and between them; other tiny models' scores hardly rise."""
    made = tiny.model(5, max_position_embeddings=4096, num_hidden_layers=1, hidden_size=64, head_dim=16)
    with torch.no_grad():
        made.model.layers[0].self_attn.q_proj.weight.mul_(factor)
    directory, tokens, blocks = tiny.write_directory(made, tmp_path), ids(1400), table(1400, 1)
    kernel = Kernel(directory)
    whole = kernel.run((tokens, 0, blocks))
    torch.testing.assert_close(whole, truth(made, tokens), rtol=5e-3, atol=5e-3)
    parts = [kernel.run((tokens[:end], end - 350, blocks)) for end in range(350, 1401, 350)]
    assert torch.equal(torch.cat(parts), whole)
    for kv_dtype in ("int8", "fp8"):
        kept = Kernel(directory, torch.bfloat16, kv_dtype=kv_dtype)
        rows = kept.run((tokens, 0, blocks))
        assert rows.isfinite().all()
        assert torch.equal(kept.run((tokens, 1399, blocks))[0], rows[-1])


def test_only_planned_rows_are_computed(tmp_path: Path) -> None:
    kernel = Kernel(tiny.write_directory(tiny.model(1, hidden_size=64, head_dim=16), tmp_path))
    kernel.run((ids(33), 0, table(33, 1)), (ids(2), 1, [150]))
    assert kernel.decoder.rows_computed == 34


def test_a_batch_that_grows_by_a_row_seldom_needs_other_buffers(tmp_path: Path) -> None:
    """A prompt beside one decode more in every step: each had its buffers made anew."""
    kernel = Kernel(tiny.write_directory(tiny.model(1, hidden_size=64, head_dim=16), tmp_path))
    made = set()
    for decodes in range(30):
        others = [(ids(3, n), 2, [100 + n]) for n in range(decodes)]
        kernel.run((ids(96), 0, table(96, 1, blocks=100)), *others)
        made.add((kernel.decoder._model.max_rows, kernel.decoder._model.max_samples))
    assert len(made) <= 5


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_copied_and_zeroed_blocks_are_what_they_say(tmp_path: Path, kv_dtype: str) -> None:
    kernel = Kernel(tiny.write_directory(tiny.model(1, hidden_size=64, head_dim=16), tmp_path), kv_dtype=kv_dtype)
    tokens = ids(40)
    want = kernel.run((tokens, 0, [1, 2, 3]))[-1]
    kernel.cache.copy([(1, 11), (2, 12), (3, 13)])
    kernel.cache.zero([1, 2, 3])
    assert not kernel.cache.data[:, [1, 2, 3]].any()
    assert torch.equal(kernel.run((tokens, 39, [11, 12, 13]))[-1], want)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_others_left_in_a_block_is_never_read(tmp_path: Path, dtype: torch.dtype, kv_dtype: str) -> None:
    """engine B: not even a NaN of another tenant's passes, whatever part of a block a sequence has come to fill."""
    directory = tiny.write_directory(tiny.model(1, hidden_size=64, head_dim=16), tmp_path)
    tokens, blocks = ids(53), table(53, 4)
    clean, poisoned = Kernel(directory, dtype, kv_dtype=kv_dtype), Kernel(directory, dtype, kv_dtype=kv_dtype)
    poisoned.cache.data.view(torch.uint8).fill_(255)  # NaN in every type, and as every scale
    ends = [1, 2, 4, 17, 20, 33, 39, *range(40, 54)]
    for start, end in zip([0, *ends], ends, strict=False):
        chunk = (tokens[:end], start, blocks)
        assert torch.equal(poisoned.run(chunk), clean.run(chunk)), f"rows {start} to {end}"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_that_is_not_a_number_is_not_overlooked(tmp_path: Path, dtype: torch.dtype, family: str) -> None:
    """Whoever sees it gets NaN, as in torch, and its sequence an error: also through Gemma 2's soft cap."""
    directory = tiny.write_directory(tiny.model(1, family, hidden_size=64, head_dim=16), tmp_path)
    assert all(broken(directory, dtype, keys).isnan().all() for keys in BROKEN_KEYS)
    assert broken(directory, dtype, []).isfinite().all()


def test_a_shape_it_cannot_run_is_named(tmp_path: Path) -> None:
    from workers.model.native.build import NativeUnavailableError

    directory = tiny.write_directory(tiny.model(1), tmp_path)  # head_dim 8
    with pytest.raises(NativeUnavailableError, match="head_dim=8 is not a multiple of 16"):
        Kernel(directory)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_narrower_machines_compute_the_same(isa: str, tmp_path: Path) -> None:
    """The AVX2 and the portable path, each in a process of its own, against transformers."""
    made = tiny.model(3, hidden_size=64, head_dim=32)
    directory, tokens = tiny.write_directory(made, tmp_path / "model"), ids(70)
    script = f"""
import torch
from pathlib import Path
from tests.workers.model.native.by_hand import BROKEN_KEYS, Kernel, broken, table
from itertools import product
for dtype, kv_dtype in product((torch.float32, torch.bfloat16), ("auto", "int8", "fp8")):
    kernel = Kernel(Path({str(directory)!r}), dtype, kv_dtype=kv_dtype)
    torch.save(kernel.run(({tokens}, 0, table(70, 1))), {str(tmp_path)!r} + f"/{{dtype}}-{{kv_dtype}}.pt")
for dtype, keys in product((torch.float32, torch.bfloat16), BROKEN_KEYS):
    assert broken(Path({str(directory)!r}), dtype, keys).isnan().all(), (dtype, keys)
print(kernel.decoder.isa)
"""
    env = {**os.environ, **kernels.FORMS[isa]}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == isa
    want = truth(made, tokens)
    torch.testing.assert_close(torch.load(tmp_path / "torch.float32-auto.pt"), want, rtol=2e-4, atol=2e-4)
    for name, most in (("bfloat16-auto", 2e-2), ("bfloat16-int8", 3e-2), ("bfloat16-fp8", 0.1)):
        assert (torch.load(tmp_path / f"torch.{name}.pt") - want).norm() / want.norm() <= most
    for kv_dtype, most in (("int8", 2e-3), ("fp8", 2e-2)):  # but for the last bits the same as on this machine
        here = Kernel(directory, kv_dtype=kv_dtype).run((tokens, 0, table(70, 1)))
        assert (torch.load(tmp_path / f"torch.float32-{kv_dtype}.pt") - here).norm() / want.norm() <= most


def test_there_is_a_compiler_on_the_test_machine() -> None:
    """Without one the rest of this file would test nothing."""
    assert compiler() is not None
