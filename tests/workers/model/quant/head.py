"""A model whose logits are one matrix times inputs that are known to the bit.

Embeddings are 1 and -1, and attention and MLP add nothing, so the last norm divides by exactly 1: what it hands to the
head is its own weights, with the signs of the token's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.workers.model.native.by_hand import table
from tests.workers.model.quant.formats import Rounded, kernel_of
from workers.model.quant.matrix import GROUP, Quantised
from workers.model.quant.rounding import int8

HIDDEN, TOKENS = 96, list(range(40))
EXACT = 7
"""Of a group's inputs those down to 2^-7 of its largest keep every bit."""


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _spread(low: float, high: float) -> Tensor:
    """bfloat16 numbers of any mantissa, their exponents even between the two, behind a group of zeros."""
    exponents = low + (high - low) * torch.rand(HIDDEN, generator=_random(1))
    made = ((1 + torch.rand(HIDDEN, generator=_random(2))) * 2 ** exponents.floor()).bfloat16().float()
    made[:GROUP] = 0
    return made


SCALES: Mapping[str, Tensor] = {
    "alike": _spread(0, EXACT - 1),
    "far apart": _spread(-20, 20),
    "small": _spread(-132, -100),
    "large": _spread(70, 90),
}
"""Of the inputs."""


def write(folder: Path, scales: Tensor) -> Path:
    """The model whose inputs have these scales [HIDDEN], as a directory."""
    from tests.workers.model import tiny  # with transformers, which a process that only computes does without

    made = tiny.model(
        6, hidden_size=HIDDEN, head_dim=16, num_hidden_layers=1, tie_word_embeddings=False, rms_norm_eps=1e-12
    )
    with torch.no_grad():
        layer = made.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        made.model.embed_tokens.weight.sign_()
        made.lm_head.weight.mul_(10 ** torch.empty(len(made.lm_head.weight), 1).uniform_(-4, 4, generator=_random(3)))
        made.lm_head.weight[5] = 0
        made.model.norm.weight.copy_(scales)
    return tiny.write_directory(made, folder)


def logits(folder: Path) -> Tensor:
    """Of ``TOKENS`` by the kernel in bfloat16, [40, 300]."""
    return kernel_of(folder, torch.bfloat16, Rounded(int8)).run((TOKENS, 0, table(len(TOKENS), 1)))


def outputs(folder: Path) -> dict[str, Tensor]:
    """``logits`` of every case."""
    return {case: logits(folder / case) for case in SCALES}


def factors(folder: Path) -> tuple[Tensor, Quantised]:
    """The inputs in double precision [40, HIDDEN], and the head."""
    stored = load_file(folder / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"].float()
    assert torch.equal(int8(embedding).dense(torch.float32), embedding)
    return (embedding[TOKENS] * stored["model.norm.weight"].float()).double(), int8(stored["lm_head.weight"])
