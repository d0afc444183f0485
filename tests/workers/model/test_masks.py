"""Grammar masks in the sampler: nothing forbidden is ever drawn, and rows without a grammar keep their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workers.engine.sequence import Sequence
from workers.model.masks import allows
from workers.model.sampler import sample
from workers.protocol import SamplingParams

VOCAB = 100


class Allows:
    """A constraint that allows these tokens; with None it has failed. Its mask ends at a whole 32-bit word."""

    def __init__(self, tokens: tuple[int, ...] | None, size: int = VOCAB) -> None:
        self._tokens, self._size = tokens, size

    def allowed(self) -> memoryview | None:
        if self._tokens is None:
            return None
        bits = np.zeros(-(-self._size // 32) * 32, dtype=np.uint8)
        bits[list(self._tokens)] = 1
        return np.packbits(bits, bitorder="little").data


def sampler(tokens: tuple[int, ...] | str | None = "any", seed: int = 0, **params: Any) -> Sequence:
    one = Sequence("s", 0, [1, 2, 3], 3, 100, SamplingParams(**params), seed=seed)
    if not isinstance(tokens, str):
        one.constraint = Allows(tokens)
    return one


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.5}, {"top_k": 1}, {"top_p": 0.01}], ids=str)
def test_only_what_is_allowed_is_drawn(params: dict[str, Any]) -> None:
    """The cuts apply to what is left: the best allowed token, not the best of all."""
    torch.manual_seed(0)
    allowed = (3, 31, 32, 64, 99)
    logits = torch.randn(200, VOCAB)
    best = logits[:, list(allowed)].argmax(dim=-1)
    drawn = [one.tokens[0] for one in sample(logits.clone(), [sampler(allowed, seed, **params) for seed in range(200)])]
    assert set(drawn) <= set(allowed)
    if params != {"temperature": 1.5}:
        assert drawn == [allowed[i] for i in best.tolist()]
    else:
        assert set(drawn) == set(allowed)


def test_rows_without_a_grammar_keep_every_bit() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, VOCAB)
    free = sample(logits[1::2].clone(), [sampler(seed=i, logprobs=3) for i in range(3)])
    mixed = [sampler((4, 5)) if i % 2 == 0 else sampler(seed=i // 2, logprobs=3) for i in range(6)]
    together = sample(logits.clone(), mixed)
    assert together[1::2] == free
    assert all(one.tokens[0] in (4, 5) for one in together[0::2])


def test_a_failed_grammar_and_one_without_a_token_end_their_rows_only() -> None:
    """A ban may leave nothing."""
    banned = sampler((7,), logit_bias={7: float("-inf")})
    got = sample(torch.randn(4, VOCAB), [sampler(None), sampler((9,)), sampler(()), banned])
    assert [one.error for one in got] == ["grammar", None, "grammar", "grammar"]
    assert [one.tokens for one in got] == [[], [9], [], []]


def test_ids_beyond_a_masks_end_are_forbidden() -> None:
    """Models pad their vocabulary: there are logits for which no token exists."""
    one = sampler((3,), temperature=0)
    one.constraint = Allows((3,), size=32)
    logits = torch.zeros(1, VOCAB)
    logits[0, 90] = 50.0
    assert sample(logits, [one])[0].tokens == [3]


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(1, VOCAB)
    raw = logits.log_softmax(dim=-1)[0]
    got = sample(logits.clone(), [sampler((12,), logprobs=2)])[0]
    assert got.tokens == [12]
    assert got.logprobs[0].logprob == pytest.approx(float(raw[12]))
    assert [token for token, _ in got.logprobs[0].top] == raw.topk(2).indices.tolist()


def test_a_single_token_is_looked_up_like_the_mask() -> None:
    constraint = Allows((0, 7, 8, 63, 99))
    assert [token for token in range(300) if allows(constraint, token)] == [0, 7, 8, 63, 99]
    assert not allows(Allows(None), 7)
