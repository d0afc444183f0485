"""From a sequence to the message about it, and when a token ends a sequence."""

from __future__ import annotations

from workers.engine.sequence import Sequence
from workers.protocol import FinishReason, SequenceOutput, Timings, TokenLogprob


def ends(sequence: Sequence, token: int, produced: int) -> FinishReason | None:
    """Whether ``token``, the ``produced``-th output token, is the sequence's last."""
    params = sequence.params
    if produced >= params.min_tokens and (
        (token in sequence.eos and not params.ignore_eos) or token in params.stop_token_ids
    ):
        return "stop"
    return "length" if produced >= sequence.max_tokens else None


def output(sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprob]) -> SequenceOutput:
    """What is new about a sequence that goes on. Only choice 0 reports the prompt that all choices share."""
    if sequence.index:
        return SequenceOutput(
            sequence.id, sequence.index, tokens, None, len(sequence.tokens) - sequence.prompt_len, logprobs=logprobs
        )
    search = sequence.search
    return SequenceOutput(
        sequence.id,
        0,
        tokens,
        None,
        len(sequence.tokens) - sequence.prompt_len if search is None else 0,  # its answers come with its end
        sequence.prompt_computed,
        sequence.prompt_cached,
        logprobs=logprobs,
        searched=None if search is None else search.billed,
    )


def last_output(sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprob]) -> SequenceOutput:
    """The message with ``finish``: sent exactly once per sequence."""
    first = sequence.index == 0
    search = sequence.search
    return SequenceOutput(
        id=sequence.id,
        index=sequence.index,
        tokens=tokens,
        output_tokens=len(tokens) if search is not None else sequence.output_len,
        prompt_computed=sequence.prompt_computed if first else 0,
        prompt_cached=sequence.prompt_cached if first else 0,
        finish=sequence.finish,
        error=sequence.error,
        logprobs=logprobs,
        timings=Timings(
            sequence.received_ns,
            sequence.scheduled_ns,
            sequence.first_token_ns,
            sequence.finished_ns,
            sequence.preemptions,
        ),
        searched=None if search is None else (search.billed if first else 0),
    )
