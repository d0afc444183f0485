"""What a worker still has to say: steps are merged while the reader is slower than the engine, so it stays bounded.

Rules
- ``put`` is called on the engine thread, ``take`` there or on the event loop, everything else on the latter; one lock
  guards all state.
- Merging keeps meaning: new tokens, text and logprobs are concatenated, cumulative counters, stats and the step number
  are the latest, an end (finish, error, timings) is never lost.
- Only sequences of the open session pass. Those of an ended session ("orphans") are swallowed until each has finished,
  so that a request of the next session may bear the same id.
- Bounded: at most one entry per sequence in flight, and a gateway has at most ``max_running`` + a few in flight as long
  as it has not read that one ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.protocol import (
    AdapterAnswer,
    FinishReason,
    Purged,
    SequenceOutput,
    StepOutputs,
    TextLogprob,
    Timings,
    TokenLogprob,
    Up,
    WorkerStats,
    encode,
)


@dataclass(slots=True)
class _Merged:
    """Several outputs of one sequence, being added up."""

    id: str
    index: int
    tokens: list[int] = field(default_factory=list)
    text: list[str] | None = None
    output_tokens: int = 0
    prompt_computed: int = 0
    prompt_cached: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_scored: int = 0
    timings: Timings | None = None
    device_ns: tuple[int, int, int] | None = None
    searched: int | None = None
    text_logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_tokens: int = 0
    retry_after_s: float | None = None
    error_param: str = ""

    def add(self, output: SequenceOutput) -> None:
        self.tokens.extend(output.tokens)
        self.logprobs.extend(output.logprobs)
        self.text_logprobs.extend(output.text_logprobs)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.prompt_scored = max(self.prompt_scored, output.prompt_scored)
        if output.text is not None:
            self.text = [*(self.text or ()), output.text]
        self.output_tokens = max(self.output_tokens, output.output_tokens)
        self.prompt_computed = max(self.prompt_computed, output.prompt_computed)
        self.prompt_cached = max(self.prompt_cached, output.prompt_cached)
        self.finish = output.finish or self.finish
        self.error = output.error or self.error
        self.timings = output.timings or self.timings
        self.device_ns = output.device_ns or self.device_ns
        if output.searched is not None:
            self.searched = max(self.searched or 0, output.searched)
        self.prompt_tokens = output.prompt_tokens or self.prompt_tokens
        self.retry_after_s = output.retry_after_s if output.retry_after_s is not None else self.retry_after_s
        self.error_param = output.error_param or self.error_param

    def build(self) -> SequenceOutput:
        return SequenceOutput(
            id=self.id,
            index=self.index,
            tokens=self.tokens,
            text=None if self.text is None else "".join(self.text),
            output_tokens=self.output_tokens,
            prompt_computed=self.prompt_computed,
            prompt_cached=self.prompt_cached,
            finish=self.finish,
            error=self.error,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_scored=self.prompt_scored,
            timings=self.timings,
            device_ns=self.device_ns,
            searched=self.searched,
            text_logprobs=self.text_logprobs,
            prompt_tokens=self.prompt_tokens,
            retry_after_s=self.retry_after_s,
            error_param=self.error_param,
        )


class Outbox:
    """Between the engine thread and the stream's writer."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, on the thread of ``put``, when the box was empty and no longer is."""
        self._wake = wake
        self._lock = threading.Lock()
        self._open = False
        self._session = 0
        self._live: dict[str, int] = {}
        """Choices still to end, per request of the open session."""
        self._orphans: dict[str, int] = {}
        self._step = 0
        self._stats: WorkerStats | None = None
        self._only: list[SequenceOutput] | None = None
        """The outputs of a single step that nothing was merged into (the usual case: no copy is made)."""
        self._merged: dict[tuple[str, int], _Merged] = {}
        self._receipts: list[Purged | AdapterAnswer] = []

    @property
    def live(self) -> list[str]:
        """Requests of the open session that have not ended."""
        with self._lock:
            return list(self._live)

    @property
    def orphans(self) -> int:
        """Requests of ended sessions that have not ended yet."""
        with self._lock:
            return len(self._orphans)

    def open(self) -> int:
        """A session begins: keep what is put from now on. Returns its number."""
        with self._lock:
            self._open = True
            self._session += 1
            return self._session

    def register(self, request_id: str, choices: int) -> bool:
        """A request of the open session arrived. False when its id is in use: it must not be run."""
        with self._lock:
            if request_id in self._live or request_id in self._orphans:
                return False
            self._live[request_id] = choices
            return True

    def close(self) -> list[str]:
        """The session ended: forget what is unsent. Returns the requests to cancel."""
        with self._lock:
            self._open = False
            orphans = list(self._live)
            self._orphans.update(self._live)
            self._live.clear()
            self._stats, self._only = None, None
            self._merged.clear()
            self._receipts.clear()
            return orphans

    def put(self, outputs: StepOutputs) -> None:
        """Add one step's news."""
        with self._lock:
            kept = [output for output in outputs.outputs if self._passes(output)]
            if not self._open:
                return
            idle = self._stats is None and not self._receipts
            self._step = max(self._step, outputs.step)
            first, self._stats = self._stats is None, outputs.stats
            if first:
                self._only = kept
            elif kept:
                for output in (*(self._only or ()), *kept):
                    self._merge(output)
                self._only = None
        if idle:
            self._wake()

    def put_receipt(self, receipt: Purged | AdapterAnswer) -> None:
        """Add the answer to a purge, or to an adapter's coming or going."""
        with self._lock:
            if not self._open:
                return
            idle = self._stats is None and not self._receipts
            self._receipts.append(receipt)
        if idle:
            self._wake()

    def take(self, session: int | None = None) -> list[Up]:
        """Everything that is to be sent now, oldest first; empties the box. Nothing where ``session`` is over."""
        with self._lock:
            messages: list[Up] = []
            if session is not None and session != self._session:
                return messages
            if self._stats is not None:
                outputs = [merged.build() for merged in self._merged.values()] + (self._only or [])
                messages.append(StepOutputs(step=self._step, outputs=outputs, stats=self._stats))
            messages.extend(self._receipts)
            self._step, self._stats, self._only = 0, None, None
            self._merged = {}
            self._receipts = []
            return messages

    def _passes(self, output: SequenceOutput) -> bool:
        """Does it belong to the open session? Counts ends, so that nothing passes after a sequence's last output."""
        table = self._live if output.id in self._live else self._orphans
        left = table.get(output.id)
        if left is None:
            return False
        if output.finish is not None:
            if left > 1:
                table[output.id] = left - 1
            else:
                del table[output.id]
        return table is self._live

    def _merge(self, output: SequenceOutput) -> None:
        key = (output.id, output.index)
        merged = self._merged.get(key)
        if merged is None:
            merged = self._merged[key] = _Merged(output.id, output.index)
        merged.add(output)


def frames(message: Up, limit: int) -> list[bytes]:
    """The message's frames: one, unless a reader was away so long that the merged step outgrew ``limit`` bytes."""
    frame = encode(message)
    if len(frame) <= limit or not isinstance(message, StepOutputs) or len(message.outputs) < 2:
        return [frame]
    half = len(message.outputs) // 2
    return [
        *frames(StepOutputs(message.step, message.outputs[:half], message.stats), limit),
        *frames(StepOutputs(message.step, message.outputs[half:], message.stats), limit),
    ]
