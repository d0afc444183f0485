"""Checks guesses: which of a chunk's drafts the model itself would have chosen. For runners; integers only, no torch.

A guess is a single token, so the rule of speculative sampling (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1;
Chen et al. 2023, arXiv:2302.01318) takes a simple form: with all the proposal's mass on token d, d is kept with
probability p(d), and else a token is drawn from p without d. Drawing from p and keeping d if that is what was drawn is
the same. So every row draws as it would have without guesses, with its own seed, position, penalties and grammar; a row
counts if all guesses before it were drawn. The answer is then not only distributed like, but equal to the one without
speculation.

Rules
- Row ``i`` of a chunk with drafts samples for the sequence as it would be after ``i`` right guesses (``standings``).
- Grammars work out what may follow each guess beside the forward pass: ``standings`` is called before it.
- What rows behind the first wrong guess drew is dropped, their errors too.
"""

from __future__ import annotations

from workers.engine.plan import Chunk, Sampled
from workers.engine.sequence import Sequence


def standings(chunk: Chunk) -> list[Sequence]:
    """The chunk's sequence as it is, after its first guess, after two …: one for each row that samples."""
    one = chunk.sequence
    drafts = chunk.drafts
    ahead = one.constraint.look_ahead(drafts) if one.constraint is not None else [None] * len(drafts)
    rows = [one]
    tokens = one.tokens
    for draft, constraint in zip(drafts, ahead, strict=True):
        tokens = [*tokens, draft]
        rows.append(
            Sequence(
                id=one.id,
                index=one.index,
                tokens=tokens,
                prompt_len=one.prompt_len,
                max_tokens=one.max_tokens,
                params=one.params,
                eos=one.eos,
                seed=one.seed,
                constraint=constraint,
            )
        )
    return rows


def fold(chunks: list[Chunk], found: list[Sampled]) -> list[Sampled]:
    """One result per sampler from one per row that samples."""
    if len(found) == sum(len(chunk.samplers) for chunk in chunks):
        return found
    folded: list[Sampled] = []
    cursor = 0
    for chunk in chunks:
        if chunk.drafts:
            rows = found[cursor : cursor + len(chunk.drafts) + 1]
            folded.append(_accepted(chunk.drafts, rows))
            cursor += len(rows)
        else:
            folded += found[cursor : cursor + len(chunk.samplers)]
            cursor += len(chunk.samplers)
    return folded


def _accepted(drafts: list[int], rows: list[Sampled]) -> Sampled:
    """What was drawn up to and with the first row whose guess was not."""
    right = 0
    while right < len(drafts) and rows[right].tokens == drafts[right : right + 1] and not rows[right + 1].error:
        right += 1
    drawn = rows[: right + 1]
    return Sampled(
        [token for row in drawn for token in row.tokens],
        [report for row in drawn for report in row.logprobs],
        error=rows[0].error,
    )
