"""What the engine remembers of a sequence and of a step, as numbers; spans and metrics are built from it afterwards.

Rules
- Plain data, no telemetry import, no strings made per token. Times are wall-clock nanoseconds given by the caller.
- Bounded: at most ``MAX_CHUNKS`` chunk records, ``MAX_STALLS`` stalls and ``MAX_PHASES`` phases per sequence; what
  exceeds them is merged into the last one, so that totals stay true.
- The engine thread writes; once handed out through ``Engine(on_record=…)`` a record is never touched again.

A sequence's life is a row of phases that never overlap: prefill → decode → preempted → prefill(recompute) → decode …
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from workers.protocol import FinishReason

if TYPE_CHECKING:
    from workers.engine.plan import StepPlan

MAX_CHUNKS = 16
MAX_STALLS = 16
MAX_PHASES = 48
STALL_FLOOR_NS = 100_000_000
STALL_FACTOR = 4
"""A gap between two tokens is a stall when it is above the floor and above this many times the mean gap so far."""

PhaseKind = Literal["prefill", "decode", "preempted"]


@dataclass(slots=True)
class ChunkRecord:
    """One prefill chunk: which step computed how many prompt tokens."""

    step: int
    start_ns: int
    end_ns: int
    tokens: int


@dataclass(slots=True)
class Phase:
    """One stretch of a sequence's life."""

    kind: PhaseKind
    start_ns: int
    end_ns: int = 0
    tokens: int = 0
    """Prefill: tokens computed. Decode: tokens produced."""
    cached: int = 0
    """Prefill: tokens taken from the prefix cache."""
    restored: int = 0
    """Prefill: those of them that were brought back from a tier below the device."""
    chunks: int = 0
    """Prefill: how many chunks it took (all of them, also those without a record of their own)."""
    recompute: bool = False
    """Prefill after a preemption: none of its tokens is billed twice."""
    reason: str = ""
    """Preempted: ``kv_pressure`` or ``runner_error``."""
    blocks_freed: int = 0


class GapDigest:
    """Quantiles of gaps in bounded space: logarithmic buckets, eight per doubling (at most 6.3 % off)."""

    __slots__ = ("_buckets", "count", "maximum", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0
        self.maximum = 0

    def add(self, gap: int) -> None:
        """Count one gap (ns)."""
        bits = gap.bit_length() if gap > 0 else 0
        bucket = gap if bits <= 4 else (bits << 3) | ((gap >> (bits - 4)) & 7)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += gap
        if gap > self.maximum:
            self.maximum = gap

    def quantile(self, q: float) -> int:
        """The gap (ns) that a share ``q`` of all gaps does not exceed: its bucket's middle, at most the maximum."""
        if not self.count:
            return 0
        rank = max(1, -int(-q * self.count // 1))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(self.maximum, self._middle(bucket))
        return self.maximum

    @staticmethod
    def _middle(bucket: int) -> int:
        bits = bucket >> 3
        if bits <= 4:
            return bucket
        width = 1 << (bits - 4)
        return (8 | (bucket & 7)) * width + width // 2


@dataclass(slots=True)
class SequenceRecord:
    """One choice of one request, from its arrival in the engine to its end."""

    id: str
    index: int
    n: int
    tenant_key: str
    prompt_tokens: int
    trace: dict[str, str] = field(default_factory=dict)
    """W3C context of the gateway's chat span."""
    received_ns: int = 0
    scheduled_ns: int = 0
    """First admission; 0 when it never was."""
    first_token_ns: int = 0
    finished_ns: int = 0
    free_blocks: int = 0
    """Free + cached blocks when it was first admitted."""
    prompt_cached: int = 0
    prompt_computed: int = 0
    output_tokens: int = 0
    recomputed: int = 0
    """Tokens computed again after a preemption: never billed, never charged."""
    drafts_accepted: int = 0
    """Guesses of speculative decoding that became tokens."""
    drafts_rejected: int = 0
    preemptions: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    phases: list[Phase] = field(default_factory=list)
    chunks: list[ChunkRecord] = field(default_factory=list)
    stalls: list[tuple[int, int]] = field(default_factory=list)
    """(time, gap) in ns."""
    gaps: GapDigest = field(default_factory=GapDigest)
    """Inter-token gaps."""
    last_token_ns: int = 0

    def _begin(self, kind: PhaseKind, now: int) -> Phase:
        phases = self.phases
        if phases:
            if not phases[-1].end_ns:
                phases[-1].end_ns = now
            if len(phases) >= MAX_PHASES:
                phases[-1].end_ns = 0
                return phases[-1]
        phase = Phase(kind, now)
        phases.append(phase)
        return phase

    def admitted(self, now: int, cached: int, free_blocks: int, restored: int = 0) -> None:
        """It got blocks; ``cached`` of its tokens were in the prefix cache, ``restored`` of them in a lower tier."""
        if not self.scheduled_ns:
            self.scheduled_ns = now
            self.free_blocks = free_blocks
        again = bool(self.phases)
        phase = self._begin("prefill", now)
        phase.cached += cached
        phase.restored += restored
        phase.recompute = again

    def chunk(self, step: int, start_ns: int, end_ns: int, tokens: int) -> None:
        """A prefill chunk was computed. Ignored while it decodes: a row that is computed once more is no prefill."""
        phase = self.phases[-1] if self.phases else None
        if phase is None or phase.kind != "prefill":
            return
        phase.tokens += tokens
        phase.chunks += 1
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(ChunkRecord(step, start_ns, end_ns, tokens))
        else:
            last = self.chunks[-1]
            last.end_ns = end_ns
            last.tokens += tokens

    def produced(self, now: int, tokens: int) -> None:
        """A step gave it ``tokens`` tokens."""
        phases = self.phases
        phase = phases[-1] if phases and phases[-1].kind == "decode" else self._begin("decode", now)
        phase.tokens += tokens
        self._gap(now)

    def guessed(self, accepted: int, rejected: int) -> None:
        """Guesses of a step that became tokens, and that did not."""
        self.drafts_accepted += accepted
        self.drafts_rejected += rejected

    def _gap(self, now: int) -> None:
        last = self.last_token_ns
        self.last_token_ns = now
        if not last:
            self.first_token_ns = now
            return
        gap = now - last
        gaps = self.gaps
        stalled = gap > STALL_FLOOR_NS and gaps.count and gap * gaps.count > STALL_FACTOR * gaps.total
        if stalled and len(self.stalls) < MAX_STALLS:
            self.stalls.append((now, gap))
        gaps.add(gap)

    def preempted(self, now: int, reason: str, blocks_freed: int) -> None:
        """It lost its blocks and waits to be computed again."""
        phase = self._begin("preempted", now)
        phase.reason = reason
        phase.blocks_freed += blocks_freed

    def ended(self, now: int) -> None:
        """Close the last phase."""
        self.finished_ns = now
        if self.phases and not self.phases[-1].end_ns:
            self.phases[-1].end_ns = now


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One wait for a prompt's blocks from another worker, before the engine has the request."""

    trace: dict[str, str]
    """W3C context of the gateway's chat span."""
    source: str
    """The address of the worker that computes the prompt."""
    start_ns: int
    end_ns: int
    result: str
    """``ok``, or why not everything came."""
    tokens: int
    """Of the prompt, computed there and arrived; 0 unless all came."""

    @property
    def seconds(self) -> float:
        """How long the request waited."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(slots=True)
class StepRecord:
    """One engine step."""

    step: int
    start_ns: int
    end_ns: int
    run_ns: int
    """Time inside the runner; the rest of end - start is planning and bookkeeping."""
    batch: int
    prefill_tokens: int
    decode_tokens: int
    kv_used: float
    """Blocks in use over all blocks, 0 to 1."""
    ids: list[str]
    """Requests in the batch, with repeats where several choices of one took part."""
    adapter_tokens: int = 0
    """Of all of them those computed with a LoRA adapter."""

    @classmethod
    def of(cls, plan: StepPlan, end_ns: int, run_ns: int, kv_used: float) -> StepRecord:
        """Of a plan that was run; ``end_ns``: all that it brought is booked and told. Once through its chunks."""
        decodes = prefills = adapted = 0
        ids: list[str] = []
        for chunk in plan.chunks:
            sequence, count = chunk.sequence, chunk.count
            ids.append(sequence.id)
            if chunk.start >= sequence.prompt_len and (count == 1 or chunk.is_decode):
                decodes += count
            else:
                prefills += count
            if sequence.adapter is not None:
                adapted += count
        return cls(
            plan.step, plan.started_ns, end_ns, run_ns, len(plan.chunks), prefills, decodes, kv_used, ids, adapted
        )
