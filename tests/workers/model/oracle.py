"""What transformers says: greedy tokens of the same weights in fp32, cut where the two best logits come too close."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

MARGIN = 1e-3
LENGTHS = (8, 12, 8, 16, 12, 20, 36)
"""All multiples of 4, so that every prompt ends on a border of blocks of 4 tokens."""

_TEXT = """The forebay is the pool just upstream of the turbines, where water is held back and evened out. In
1882 the first station lit four hundred lamps. A river does not ask who drinks from it; a town must,
or the mill upstream takes it all. She counted the steps to the harbour, twice, and wrote the number
down. def add(a, b): return a + b. Prices rose by 12 percent in spring, then fell. Water boils at a
lower temperature on a mountain because the air is thinner. "Where is the key?" he asked. Nobody
answered. Light travels 299792 kilometres in one second. To make bread you need flour, water, salt
and time; most people forget the time. The committee met on Tuesday and decided to meet again. Birds
fly south before the first snow. If all men are mortal and he is a man, then he is mortal. Once upon
a time there was a small machine that read every book in the library and remembered none of them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the tokens that must follow."""

    prompt: list[int]
    expected: list[int]
    logprobs: list[float]
    """Of the expected tokens."""
    margins: list[float]
    """By how much each beats the next best logit."""


def prompts(tokenizer: Path, vocab: int, count: int, sizes: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """``count`` different pieces of running text, ``sizes`` in turn, as token ids below ``vocab``."""
    ids = [token for token in Tokenizer.from_file(str(tokenizer)).encode(_TEXT).ids if token < vocab]
    starts = random.Random(2).sample(range(len(ids) - max(sizes)), count)
    lengths = (sizes[index % len(sizes)] for index in range(count))
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def greedy(directory: Path, wanted: list[list[int]], new_tokens: int) -> list[Case]:
    """Greedy continuation of every prompt, each cut before the first position whose top-2 margin is at most MARGIN."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    order = sorted(range(len(wanted)), key=lambda index: len(wanted[index]))
    found: dict[int, Case] = {}
    for _, group in groupby(order, key=lambda index: len(wanted[index])):
        members = list(group)
        tokens = torch.tensor([wanted[index] for index in members])  # equal lengths: the oracle needs no padding
        figures = _continue(model, tokens, new_tokens)
        for line, index in enumerate(members):
            keep = int((figures[2][line] > MARGIN).long().cumprod(0).sum())
            found[index] = Case(wanted[index], *(figure[line, :keep].tolist() for figure in figures))
    return [found[index] for index in range(len(wanted))]


def _continue(model: Any, tokens: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, their log probabilities and their margins, each [batch, steps]."""
    model.generation_config.eos_token_id = None  # nothing stops early
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(found.logits, 1)
    best = logits.topk(2)
    assert torch.equal(best.indices[..., 0], found.sequences[:, tokens.shape[1] :])
    logprobs = best.values[..., 0] - logits.logsumexp(-1)
    return best.indices[..., 0], logprobs, best.values[..., 0] - best.values[..., 1]
