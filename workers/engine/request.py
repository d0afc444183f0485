"""Turns a ``Generate`` into sequences, or says why it can never run. Everything is refused here or not at all.

Refusal codes are those of ``workers.protocol.ERRORS``: ``prompt_too_long`` when prompt + output fits neither context
nor pool, ``bad_request`` for values no model can compute with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from math import isfinite

from workers.engine.beams import BeamSearch
from workers.engine.block_hash import KeyChain
from workers.engine.record import SequenceRecord
from workers.engine.sequence import Sequence
from workers.engine.tables import Tables
from workers.protocol import Beams, Generate, SamplingParams

MAX_CHOICES = 1024
MAX_BEAMS = 64
MAX_PENALTY = 10.0
MOST_NUMBER = 1e6
"""Largest temperature, penalty or bias: sums of as many stay finite in fp32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker can hold at all."""

    blocks: int
    block_size: int
    max_context: int
    vocab_size: int | None = None
    eos: frozenset[int] = frozenset()
    tables: Tables = field(default_factory=Tables)
    """With the same block size."""

    def worst_blocks(self, prompt: int, max_tokens: int, beams: int = 1) -> int:
        """Blocks one sequence, or one beam search, ever needs: its last token is produced but never computed.

        Beams share the prompt's full blocks; everything after them each may have of its own.
        """
        tokens = prompt + max_tokens - 1
        if beams == 1:
            return self.tables.worst(tokens)
        own = -(-tokens // self.block_size) - prompt // self.block_size
        most = [self.tables.most(table, tokens) for table in range(self.tables.count)]
        return sum(most) + (beams - 1) * sum(min(own, blocks) for blocks in most)

    def refusal(self, generate: Generate) -> str | None:
        """Why this request can never run, or None."""
        prompt = len(generate.tokens)
        numbers_fit = (
            prompt > 0
            and generate.max_tokens > 0
            and 0 < generate.n <= MAX_CHOICES
            and isfinite(generate.weight)
            and generate.weight > 0
        )
        if not numbers_fit:
            return "bad_request"
        if prompt + generate.max_tokens > self.max_context:
            return "prompt_too_long"
        beams = generate.beams
        if beams is not None and not self._searchable(generate, beams):
            return "bad_request"
        if self.worst_blocks(prompt, generate.max_tokens, beams.width if beams else 1) > self.blocks:
            return "prompt_too_long"
        ceiling = self.vocab_size if self.vocab_size is not None else 2**31
        if min(generate.tokens) < 0 or max(generate.tokens) >= ceiling:
            return "bad_request"
        if generate.grammar and generate.beams is not None:
            return "bad_request"
        if not _computable(generate.params):
            return "bad_request"
        bias = generate.params.logit_bias
        if bias and (min(bias) < 0 or max(bias) >= ceiling):
            return "bad_request"
        return None

    def _searchable(self, generate: Generate, beams: Beams) -> bool:
        """Whether the figures make a search: enough beams for the answers, and tokens for the beams to differ in."""
        ends = len(self.eos) + len(generate.params.stop_token_ids)
        fits = self.vocab_size is None or max(2, 1 + ends) * beams.width <= self.vocab_size
        return generate.n <= beams.width <= MAX_BEAMS and abs(beams.length_penalty) <= MAX_PENALTY and fits


def _computable(params: SamplingParams) -> bool:
    """Whether a sampler can compute with these numbers: of a step it makes one tensor for all of its sequences, so
    what does not fit into one, or makes infinities, would be everybody's trouble."""
    penalties = (params.presence_penalty, params.frequency_penalty)
    return (
        all(map(isfinite, (params.top_p, params.min_p, params.typical_p)))
        and 0 <= params.temperature <= MOST_NUMBER
        and 0 < params.repetition_penalty <= MOST_NUMBER
        and all(abs(number) <= MOST_NUMBER for number in (*penalties, *params.logit_bias.values()))
        and -1 <= params.top_k < 2**31
        and (params.logprobs is None or 0 <= params.logprobs < 2**31)
    )


def stream_seed(generate: Generate, index: int, engine_seed: int) -> int:
    """Seed of choice ``index``: the caller's + index, or one that is different for every request and choice."""
    if generate.params.seed is not None:
        return generate.params.seed + index
    text = f"{engine_seed}\0{generate.id}\0{index}".encode()
    return int.from_bytes(sha256(text).digest()[:8], "little") >> 1


@dataclass(frozen=True, slots=True)
class SequenceMaker:
    """What all sequences of one engine have in common."""

    revision: str
    eos: frozenset[int]
    block_size: int
    prefix_cache: bool
    seed: int
    records: bool

    def make(self, generate: Generate, ranks: Iterator[int], now: int) -> list[Sequence]:
        """The ``n`` choices or all beams, first to last, ranked by arrival. Each has its own list of the tokens."""
        made: list[Sequence] = []
        search = self._search(generate)
        labels = frozenset(generate.labels)
        choices = max(1, generate.n)
        for index in range(min(max(choices, generate.lines), MAX_CHOICES)):
            sequence = Sequence(
                id=generate.id,
                index=index,
                tokens=list(generate.tokens),
                prompt_len=len(generate.tokens),
                max_tokens=generate.max_tokens,
                params=generate.params,
                scope=generate.scope,
                labels=labels,
                adapter=generate.adapter,
                tenant_key=generate.tenant_key,
                weight=generate.weight,
                arrival=next(ranks),
                eos=self.eos,
                seed=stream_seed(generate, index, self.seed),
                received_ns=now,
                search=search,
                silent=index >= choices,
            )
            if search is not None:
                search.members.append(sequence)
            if self.prefix_cache:
                sequence.chain = KeyChain(
                    generate.scope,
                    self.revision,
                    generate.adapter,
                    self.block_size,
                    public_tokens=generate.public_prefix_tokens,
                )
            if self.records and not sequence.silent:
                sequence.record = SequenceRecord(
                    id=generate.id,
                    index=index,
                    n=generate.n,
                    tenant_key=generate.tenant_key,
                    prompt_tokens=len(generate.tokens),
                    trace=generate.trace,
                    received_ns=now,
                )
            made.append(sequence)
        return made

    def _search(self, generate: Generate) -> BeamSearch | None:
        if generate.beams is None:
            return None
        eos = frozenset() if generate.params.ignore_eos else self.eos
        ends = eos | frozenset(generate.params.stop_token_ids)
        return BeamSearch(generate.beams, generate.n, generate.max_tokens, ends)
