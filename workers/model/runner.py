"""Runs a step plan with torch: lay the rows out, forward, sample. The engine thread is its only caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.plan import Chunk, StepPlan, StepResult
from workers.engine.sequence import Sequence
from workers.engine.verify import fold
from workers.model.attention import Attend, AttentionBackend
from workers.model.batch import Layout, lay_out, place
from workers.model.current import work_on
from workers.model.deltas import Deltas, TorchAdapter, deltas_of
from workers.model.graphs import DecodeGraphs
from workers.model.host_tier import HostTier, prepare
from workers.model.kv_cache import KvCache
from workers.model.sampler import sample
from workers.model.scores import score
from workers.protocol import SamplingParams


class Decoder(Protocol):
    """What an architecture must offer; llama.py is the pattern."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        rows: Tensor,
        deltas: Deltas | None = None,
    ) -> Tensor:
        """fp32 logits [len(rows), vocab] of the wanted rows. ``deltas`` come only where it says ``takes_adapters``."""
        ...


def compiled_since(runner: object) -> Callable[[], int]:
    """How many forms of kernels are compiled from now on (``TorchRunner.compiled``), also of one behind a draft."""
    count: Callable[[], int] = getattr(getattr(runner, "runner", runner), "compiled", lambda: 0)
    before = count()
    return lambda: count() - before


class TorchRunner:
    """``workers.engine.plan.Runner`` on a torch device."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        attention: AttentionBackend,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """``graphs``: of the same decoder, cache and backend, for steps that only decode."""
        self.decoder, self.cache, self.attention, self._device = decoder, cache, attention, device
        self._graphs = graphs
        self._adapters: dict[str, TorchAdapter] = {}
        self.host: HostTier | None = None
        """The tier below the device."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Save, zero, restore, copy, compute, sample, in this order.

        Raises SequenceFault naming the sequences without one finite logit, ValueError for a plan that does not fit its
        sequences.
        """
        work_on(self._device)
        prepare(plan, self.cache, self.host)
        if not plan.chunks:
            return StepResult([])
        layout = lay_out(plan.chunks, self.cache.block_size, scoring=plan.scores)
        deltas = deltas_of(plan.chunks, layout.starts, self._adapters, self._device)
        # A recorded step has no place for adapters: one that needs them runs as it comes.
        logits = self._graphs.run(layout) if self._graphs is not None and deltas is None else None
        if logits is None:
            logits = self._forward(layout, deltas)
        scores = score(logits, layout.scores) if layout.scores else []
        if scores or len(layout.samplers) != len(layout.logit_rows):
            logits = logits[torch.tensor(layout.sampler_rows, dtype=torch.int64, device=self._device)]
        return StepResult(fold(plan.chunks, sample(logits, layout.samplers)), scores)

    def _forward(self, layout: Layout, deltas: Deltas | None = None) -> Tensor:
        batch = place(layout, self._device)
        attend = Attend(self.attention, self.cache, batch)
        if deltas is None:
            return self.decoder(batch.tokens, batch.positions, attend, batch.rows)
        return self.decoder(batch.tokens, batch.positions, attend, batch.rows, deltas)

    @torch.inference_mode()
    def logits(self, chunk: Chunk) -> Tensor:
        """fp32 logits [count, vocab] of every row of one chunk: to measure a model, not to serve with."""
        work_on(self._device)
        batch = place(lay_out([chunk], self.cache.block_size), self._device)
        every = torch.arange(chunk.count, device=self._device)
        attend = Attend(self.attention, self.cache, batch)
        return self.decoder(batch.tokens, batch.positions, attend, every)

    @torch.inference_mode()
    def likeliest(self, chunks: list[Chunk]) -> list[int]:
        """Compute chunks; the likeliest next token of each that samples (``draft.py``)."""
        work_on(self._device)
        logits = self._forward(lay_out(chunks, self.cache.block_size))
        return logits.argmax(dim=-1).tolist() if len(logits) else []

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (source, destination), at once."""
        with torch.inference_mode():
            self.cache.copy(pairs)

    def compiled(self) -> int:
        """Forms of kernels that were compiled so far: after the start it must not grow."""
        count: Callable[[], int] = getattr(self.attention, "compiled", lambda: 0)
        return count()

    def warm_up(self) -> None:
        """Run a prompt and a decode once, so that nothing is compiled or set up in a request's step. Leaves zeros."""
        size = self.cache.block_size
        one = Sequence("warm-up", 0, [0, 0, 0], 2, 2, SamplingParams(temperature=0.0))
        count = self.cache.tables.count
        own = list(range(min(self.cache.blocks // count, -(-len(one.tokens) // size))))
        every = self.cache.tables.put(one, own)
        for chunk in (Chunk(one, 0, 2), Chunk(one, 2, 1, (one,))):
            if chunk.start + chunk.count <= len(one.blocks) * size:
                self.run(StepPlan(0, [chunk]))
        self.zero_blocks(every)

    def zero_blocks(self, blocks: list[int]) -> None:
        """Overwrite the keys and values of ``blocks`` with zeros, at once."""
        with torch.inference_mode():
            self.cache.zero(blocks)

    def install(self, digest: str, weights: object) -> None:
        """Use an adapter for sequences that name ``digest``."""
        assert isinstance(weights, TorchAdapter)
        self._adapters[digest] = weights

    def remove(self, digest: str) -> None:
        """Forget an adapter that no sequence names any more."""
        del self._adapters[digest]
