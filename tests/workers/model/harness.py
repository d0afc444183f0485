"""Runs requests through the real engine and the real runner, and notes what happened on the way."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workers.config import EngineConfig
from workers.engine.loop import Engine
from workers.engine.plan import Chunk, Runner, StepPlan, StepResult
from workers.engine.sequence import Sequence
from workers.model.attention import Attend
from workers.model.batch import build
from workers.model.loading import LoadedModel, load
from workers.model.native.runner import NativeRunner, layout
from workers.protocol import Generate, SamplingParams, SequenceOutput, StepOutputs

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)


@dataclass
class Noting:
    """A runner that passes every plan on and keeps its figures."""

    runner: Runner
    chunks: list[int] = field(default_factory=list)
    mixed_steps: int = 0
    widest: int = 0

    def run(self, plan: StepPlan) -> StepResult:
        counts = [chunk.count for chunk in plan.chunks]
        decodes = sum(chunk.is_decode for chunk in plan.chunks)
        self.chunks += counts
        self.widest = max(self.widest, len(counts))
        self.mixed_steps += 0 < decodes < len(counts)
        return self.runner.run(plan)

    def zero_blocks(self, blocks: list[int]) -> None:
        self.runner.zero_blocks(blocks)


@dataclass(slots=True)
class Finished:
    """One choice, after its last output."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: SequenceOutput | None = None


class Bench:
    """One loaded model under one engine. ``step`` is called here, so that a test decides when what arrives."""

    def __init__(self, source: Path | str, engine: EngineConfig, loaded: LoadedModel | None = None) -> None:
        self.model = loaded or load(source, engine)
        self.noted = Noting(self.model.runner)
        self.done: dict[tuple[str, int], Finished] = {}
        self.preemptions = 0
        self.engine = Engine(
            engine,
            self.noted,
            blocks=engine.blocks or self.model.blocks,
            max_context=self.model.max_context,
            revision=self.model.revision,
            eos_ids=self.model.eos_ids,
            vocab_size=self.model.vocab_size,
            windows=self.model.windows,
            twice_at=self.model.twice_at,
            on_outputs=self._take,
            adapters=self.model.adapters,
            store=self.model.store,
        )

    def _take(self, news: StepOutputs) -> None:
        self.preemptions = news.stats.preemptions
        for output in news.outputs:
            kept = self.done.setdefault((output.id, output.index), Finished())
            kept.tokens += output.tokens
            kept.logprobs += [one.logprob for one in output.logprobs]
            if output.finish is not None:
                assert kept.last is None, "two last outputs"
                kept.last = output

    def run(self, requests: Iterable[Generate], stagger: int = 0) -> list[Finished]:
        """Submit all, one every ``stagger`` steps (0: at once), and step until nothing is left; choice 0 of each."""
        requests = list(requests)
        for request in requests:
            self.engine.submit(request)
            for _ in range(stagger):
                self.engine.step()
        for _ in range(100_000):
            if not self.engine.step():
                if not len(self.engine.planner):
                    break
                time.sleep(0.001)  # a sequence waits for the disk
        self.engine.planner.check()
        return [self.done[request.id, 0] for request in requests]


def logits_of(
    model: LoadedModel, tokens: list[int], splits: list[int], table: list[int], last: int | None = None
) -> torch.Tensor:
    """fp32 logits [tokens, vocab], computed in chunks that end at ``splits``, on any backend.

    ``last``: of so many rows at the end only; None = of all.
    """
    one = Sequence("s", 0, list(tokens), len(tokens), 1, SamplingParams())
    model.tables.put(one, table)
    found, start = [], 0
    with torch.inference_mode():
        for end in splits:
            wanted = range(max(0, len(tokens) - start - last) if last is not None else 0, end - start)
            found.append(_chunk_logits(model, Chunk(one, start, end - start), wanted))
            start = end
    return torch.cat(found)


def _chunk_logits(model: LoadedModel, chunk: Chunk, wanted: range) -> torch.Tensor:
    runner = model.runner
    if isinstance(runner, NativeRunner):
        rows, _, _ = layout(StepPlan(1, [chunk]), runner.cache.block_size)
        rows.sample_rows = array("i", wanted)
        return runner.decoder.forward(rows)[0].clone()
    device = runner.cache.data.device
    batch = build([chunk], runner.cache.block_size, device)
    attend = Attend(runner.attention, runner.cache, batch)
    return runner.decoder(
        batch.tokens, batch.positions, attend, torch.tensor(wanted, dtype=torch.int64, device=device)
    ).cpu()
