"""Log probabilities of a prompt's own tokens (``SamplingParams.prompt_logprobs``): which rows of a step give them.

The row of token i scores token i + 1, so a prompt of n tokens has n - 1 rows that do; its first token has no score.

Rules
- A row that came from a cache has no logits. So a prompt is taken from the caches no further than it is scored already:
  not at all when it begins, and all of it when it comes back from a preemption that interrupted its answer.
- A row is scored once: ``Sequence.scored`` of them are, in order, and were reported. Nothing is kept beside that count,
  so there is nothing of another request that could be taken for a score.
- Only choice 0 reports the prompt that all choices share.
- Logits are as wide as the vocabulary: a step scores at most ``MOST_ROWS`` rows, of all its prompts together. Without a
  KV cache, where every step computes the whole prompt, it is scored in as many steps as that takes, and then answered.
"""

from __future__ import annotations

from msgspec.structs import replace as with_fields

from workers.engine.plan import Chunk, StepPlan, StepResult
from workers.engine.sequence import Sequence
from workers.protocol import SequenceOutput

MOST_ROWS = 128


def pending(sequence: Sequence) -> bool:
    """Whether rows of its prompt are still to be scored."""
    return sequence.params.prompt_logprobs and sequence.index == 0 and sequence.scored < sequence.prompt_len - 1


def reusable(sequence: Sequence, size: int) -> int:
    """How many leading blocks of ``size`` tokens may come from a cache: the last known token is always computed."""
    most = (len(sequence.tokens) - 1) // size
    return min(most, sequence.scored // size) if pending(sequence) else most


def rows(chunk: Chunk) -> range:
    """Rows of the chunk, counted from its first, that score the token behind them."""
    sequence = chunk.sequence
    if not pending(sequence):
        return range(0)
    first = max(0, sequence.scored - chunk.start)
    return range(first, max(first, min(chunk.count, sequence.prompt_len - 1 - chunk.start, first + MOST_ROWS)))


def targets(chunk: Chunk) -> list[int]:
    """The tokens that ``rows(chunk)`` score."""
    scored = rows(chunk)
    return chunk.sequence.tokens[chunk.start + scored.start + 1 : chunk.start + scored.stop + 1]


def expect(plan: StepPlan, result: StepResult) -> None:
    """Raises ValueError for scores that are not those of the plan's rows."""
    wanted = [len(scored) for chunk in plan.chunks if (scored := rows(chunk))]
    if wanted != (found := [len(scores) for scores in result.scores]):
        raise ValueError(f"scores: the runner returned {found} for prompts of which {wanted} rows are scored")


def book(plan: StepPlan, result: StepResult, outputs: list[SequenceOutput]) -> None:
    """Add the scores to what is told of their sequences."""
    told = {output.id: place for place, output in enumerate(outputs) if not output.index}
    chunks = [chunk for chunk in plan.chunks if rows(chunk)]
    for chunk, scores in zip(chunks, result.scores, strict=True):
        sequence = chunk.sequence
        sequence.scored += len(scores)
        place = told[sequence.id]
        outputs[place] = with_fields(outputs[place], prompt_logprobs=scores, prompt_scored=sequence.scored)
