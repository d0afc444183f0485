"""A sequence whose numbers break, on the kernel: it ends, and nothing of it reaches anybody else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench
from workers.config import EngineConfig
from workers.protocol import Generate

HEALTHY = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8"), ("float32", "fp8")]
)
def test_a_broken_sequence_ends_and_the_others_go_on(tmp_path: Path, dtype: str, kv_dtype: str) -> None:
    """engine: token 299 is NaN in the embedding. Who comes next gets the blocks that it filled with NaN."""
    made = tiny.model(11, hidden_size=64, head_dim=16, tie_word_embeddings=False)
    folder = tiny.write_directory(made, tmp_path / "m")
    kept = load_file(folder / "model.safetensors")
    kept["model.embed_tokens.weight"][299] = math.nan
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    engine = EngineConfig.model_validate(
        {
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "device": "cpu",
            "attention": "native",
            "blocks": 4,
            "prefix_cache": False,
            "threads": 1,
        }
    )
    expected = Bench(folder, engine).run([Generate("ok", HEALTHY, 20, GREEDY)])[0].tokens
    bench = Bench(folder, engine)
    broken = [299, *range(3, 30)]
    bad, good = bench.run([Generate("bad", broken, 4, GREEDY), Generate("ok", HEALTHY, 20, GREEDY)])
    assert bad.last is not None
    assert (bad.last.finish, bad.last.error, bad.tokens) == ("error", "internal", [])
    assert good.tokens == expected
    for turn in range(3):
        assert bench.run([Generate(f"next {turn}", HEALTHY, 20, GREEDY)])[0].tokens == expected
