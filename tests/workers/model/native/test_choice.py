"""Which rows keep the kernel's own choice of a token, and that it is the sampler's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.workers.model import tiny
from workers.config import EngineConfig
from workers.engine.plan import Chunk, StepPlan
from workers.engine.sequence import Sequence
from workers.model.loading import load
from workers.protocol import SamplingParams


def test_the_kernels_choice_stands_where_a_grammar_allows_it(tmp_path: Path) -> None:
    """Greedy rows under grammars, mixed with free and drawn ones, choose as the sampler alone would."""
    made = tiny.model(hidden_size=64, head_dim=16)
    tiny.write_directory(made, tmp_path)
    loaded = load(tmp_path, EngineConfig(blocks=64, device="cpu", attention="native", dtype="float32", threads=1))
    prompts = [[5 + i, 9, 40 + i, 7] for i in range(6)]

    class Allows:
        def __init__(self, tokens: list[int]) -> None:
            bits = np.zeros(320, dtype=np.uint8)
            bits[tokens] = 1
            self._mask = np.packbits(bits, bitorder="little").data

        def allowed(self) -> memoryview:
            return self._mask

    def run(allowed: list[list[int] | None]) -> list[list[int]]:
        chunks = []
        for i, (prompt, tokens) in enumerate(zip(prompts, allowed, strict=True)):
            one = Sequence(f"s{i}", 0, list(prompt), 4, 8, SamplingParams(temperature=i % 3 / 2), blocks=[i], seed=i)
            one.constraint = None if tokens is None else Allows(tokens)
            chunks.append(Chunk(one, 0, 4, (one,)))
        return [sampled.tokens for sampled in loaded.runner.run(StepPlan(1, chunks)).sampled]

    free = run([None] * 6)
    with torch.inference_mode():
        logits = [made(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    second = [int(row.topk(2).indices[1]) for row in logits]
    assert run([[*tokens, 299] for tokens in free])[0::3] == free[0::3]
    assert run([[token, int(row.argmin())] for token, row in zip(second, logits, strict=True)])[0::3] == [
        [token] for token in second[0::3]
    ]
    assert run([None, free[1], None, None, free[4], None]) == free
