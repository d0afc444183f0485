"""A sequence: one token line being computed. Worker-private and mutable.

Rules
- The engine thread is the only writer; nobody else holds a reference.
- ``tokens`` = prompt + output so far ("known tokens"); ``computed`` of them have keys and values in ``blocks``
  ("computed tokens"). Every step, computed catches up with known; there is no prefill phase and no decode phase.
- 0 <= computed <= len(tokens) - 1 whenever the sequence waits for its next step: the last known token is always
  computed again or for the first time, since its logits give the next one. Only a beam that waits for the others of its
  search has computed them all.
- ``blocks[i]`` holds positions [i*block_size, (i+1)*block_size); len(blocks) * block_size >= computed. Models with
  windows have more such tables (``others``), and entries of blocks that are not needed any more (``tables.py``).
- ``finish`` is set exactly once, by the engine loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.engine.beams import BeamSearch
from workers.engine.block_hash import BlockKey, KeyChain
from workers.engine.constraint import Constraint
from workers.engine.record import SequenceRecord
from workers.engine.tables import in_use
from workers.protocol import FinishReason, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from workers.engine.drafting import Drafter


@dataclass(slots=True)
class Swap:
    """Where a preempted sequence's own blocks wait in host memory: those that nobody could hit."""

    first: int
    """Blocks before it are found under their keys, or everything is computed again."""
    computed: int
    """Tokens that were computed when it was preempted."""
    slots: list[int]


@dataclass(slots=True)
class Fetch:
    """What of a waiting sequence's prefix is being read from the disk."""

    keys: list[BlockKey]
    """In order of the prefix."""
    missing: set[BlockKey]
    """Not there yet; empty when the sequence waits for nothing."""
    until_ns: int = 0
    """It waits no longer than this."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's ``n`` choices."""

    id: str
    index: int
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    params: SamplingParams
    scope: bytes = b""
    labels: frozenset[bytes] = frozenset()
    """Under which a purge may find its blocks, beside its scope."""
    adapter: str | None = None
    tenant_key: str = ""
    weight: float = 1.0
    arrival: int = 0
    """Rank of arrival in this engine; survives preemption, so the order within a class does too."""
    eos: frozenset[int] = frozenset()
    seed: int = 0
    """Seed of this sequence's own random stream: results never depend on what else is in the batch."""

    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)
    """Further block tables, of a model whose layers attend to differently many tokens (``tables.py``)."""
    slid: list[int] = field(default_factory=list)
    """By table, leading entries whose blocks were given back; empty for a model with one table that keeps all."""
    keys: list[BlockKey] = field(default_factory=list)
    """Chain keys of the full blocks of ``tokens``, extended lazily."""
    published: int = 0
    """How many of ``blocks`` are registered in the prefix cache under ``keys``."""
    prompt_computed: int = 0
    """Prompt tokens computed for the first time (recompute after preemption is not counted)."""
    prompt_cached: int = 0
    scored: int = 0
    """Rows of the prompt whose scores were reported (``scoring.py``)."""
    high_water: int = 0
    """Largest ``computed`` ever reached: tokens below it are recompute."""
    preemptions: int = 0
    siblings: list[Sequence] = field(default_factory=list)
    """Choices 1..n-1 that fork from this one when its prompt is computed."""
    finish: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    search: BeamSearch | None = None
    """The beam search whose beam this is."""
    silent: bool = False
    """A beam beyond the choices that were asked for: nothing is reported of it."""

    received_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0

    constraint: Constraint | None = None
    """Which tokens its grammar allows next; None: any. A function of the output, so preemption leaves it alone."""
    chain: KeyChain | None = None
    """Makes ``keys``; None when the prefix cache is off."""
    purged: bool = False
    """It was purged while it ran: it publishes nothing more and its blocks are zeroed when released."""
    drafter: Drafter | None = None
    """What speculation keeps of it; None before its first guess."""
    swap: Swap | None = None
    """While it waits, preempted: blocks of its own that come back with it (``tiers.py``)."""
    fetch: Fetch | None = None
    """Looked for on the disk already, if not None."""
    record: SequenceRecord | None = None
    """Timings for telemetry; None when nobody asked for them."""

    def tables(self) -> list[list[int]]:
        """All its block tables."""
        return [self.blocks, *self.others]

    def held(self) -> list[int]:
        """The blocks it uses, so that releasing them from the end breaks chains at their ends."""
        return in_use(self.tables()) if self.slid else self.blocks

    @property
    def fetching(self) -> bool:
        """Whether it waits for the disk: others may overtake it."""
        return self.fetch is not None and bool(self.fetch.missing)

    @property
    def output_len(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        """Tokens produced so far (a copy)."""
        return self.tokens[self.prompt_len :]
