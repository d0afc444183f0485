"""``best_of`` of completions without beam search: more answers are drawn than given, the likeliest are.

An answer's rank is the mean log probability of its tokens, as OpenAI's. All that are drawn are counted and charged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway.errors import bad_request
from gateway.http import common
from gateway.http.jsonfields import read

if TYPE_CHECKING:
    from gateway.http.openai import Answer


def best_of(fields: Mapping[str, msgspec.Raw], n: int, *, stream: bool) -> int | None:
    """How many answers to draw; None where that is ``n``. Raises ApiError 400."""
    drawn: int = read(fields, "best_of", common.N, 1)
    if drawn in (1, n):  # 1 is the API's default, which clients send by habit
        return None
    if drawn < n:
        raise bad_request(f"best_of ({drawn}) is below n ({n}); draw at least n answers.", param="best_of")
    if stream:
        raise bad_request("best_of ranks whole answers; send stream: false.", param="best_of")
    return drawn


def best(answers: Sequence[Answer], n: int) -> list[Answer]:
    """The ``n`` likeliest, likeliest first and numbered anew. Equally likely ones keep their order."""
    chosen = sorted(answers, key=_rank, reverse=True)[:n]
    for index, answer in enumerate(chosen):
        answer.index = index
    return chosen


def _rank(answer: Answer) -> float:
    """Mean log probability; an answer without tokens comes last."""
    scores = [token.logprob for token in answer.scored]
    return sum(scores) / len(scores) if scores else float("-inf")
