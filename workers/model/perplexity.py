"""How surprised a loaded model is by a text: what a lossy switch costs, in one number.

Perplexity is e to the mean of -log p(token | tokens before) over all tokens but the first (Jelinek et al. 1977). Two
settings are compared on the same tokens of the same tokenizer; between models it says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from workers.engine.plan import Chunk
from workers.engine.sequence import Sequence
from workers.model.loading import LoadedModel
from workers.protocol import SamplingParams

CHUNK = 128
"""Rows at a time: logits of a whole text would take its tokens × vocabulary × 4 bytes."""


def read(model: LoadedModel, tokens: Items[int], chunk: int = CHUNK) -> tuple[list[float], list[int]]:
    """Of each token but the first: the natural logarithm of its probability given those before, and which token was
    the likeliest in its place. Two lists of len(tokens) - 1.

    Runs in the first blocks of the model's cache, which nobody else may be using, and leaves them zeroed. Raises
    ValueError for fewer than two tokens, and for more than the context or the cache holds.
    """
    most = min(model.max_context, model.cache_tokens)
    if not 2 <= len(tokens) <= most:
        raise ValueError(f"a text of {len(tokens)} tokens cannot be measured here; from 2 to {most} can")
    blocks = list(range(-(-len(tokens) // model.block_size)))
    one = Sequence("text", 0, list(tokens), len(tokens), 1, SamplingParams())
    every = model.tables.put(one, blocks)
    found: list[float] = []
    likeliest: list[int] = []
    try:
        for start in range(0, len(tokens) - 1, chunk):
            count = min(chunk, len(tokens) - 1 - start)
            logits = model.runner.logits(Chunk(one, start, count)).double()
            after = torch.tensor(tokens[start + 1 : start + 1 + count], device=logits.device)
            found += logits.log_softmax(-1).gather(1, after[:, None])[:, 0].tolist()
            likeliest += logits.argmax(-1).tolist()
    finally:
        model.runner.zero_blocks(every)
    return found, likeliest


def log_probabilities(model: LoadedModel, tokens: Items[int], chunk: int = CHUNK) -> Tensor:
    """fp64 [len(tokens) - 1]: the first part of ``read``. Raises ValueError as it does."""
    return torch.tensor(read(model, tokens, chunk)[0], dtype=torch.float64)


def perplexity(model: LoadedModel, tokens: Items[int], chunk: int = CHUNK) -> float:
    """e^-mean of ``log_probabilities``; infinite where a token is impossible. Raises ValueError as it does."""
    return math.exp(-log_probabilities(model, tokens, chunk).mean().item())
