"""Runs a step plan with torch: lay the rows out, forward, sample. The engine thread is its only caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.plan import StepPlan, StepResult
from workers.model.attention import Attend, AttentionBackend
from workers.model.batch import build
from workers.model.kv_cache import KvCache
from workers.model.sampler import sample


class Decoder(Protocol):
    """What an architecture must offer; llama.py is the pattern."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor], rows: Tensor
    ) -> Tensor:
        """fp32 logits [len(rows), vocab] of the wanted rows."""
        ...


class TorchRunner:
    """``workers.engine.plan.Runner`` on a torch device."""

    def __init__(self, decoder: Decoder, cache: KvCache, attention: AttentionBackend, device: torch.device) -> None:
        self.decoder, self.cache, self.attention, self._device = decoder, cache, attention, device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Zero, copy, compute, sample, in this order.

        Raises SequenceFault naming the sequences without one finite logit, ValueError for a plan that does not fit its
        sequences.
        """
        self.cache.zero(plan.zero)
        self.cache.copy(plan.copies)
        if not plan.chunks:
            return StepResult([])
        batch = build(plan.chunks, self.cache.block_size, self._device)
        rows = torch.tensor(batch.logit_rows, dtype=torch.int64, device=self._device)
        attend = Attend(self.attention, self.cache, batch)
        logits = self.decoder(batch.tokens, batch.positions, attend, rows)
        if len(batch.samplers) != len(batch.logit_rows):
            logits = logits[torch.tensor(batch.sampler_rows, dtype=torch.int64, device=self._device)]
        return StepResult(sample(logits, batch.samplers))

    def zero_blocks(self, blocks: list[int]) -> None:
        """Overwrite the keys and values of ``blocks`` with zeros, at once."""
        with torch.inference_mode():
            self.cache.zero(blocks)
