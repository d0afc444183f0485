"""Drives a planner with a ``FakeRunner`` and holds every promise against what comes out."""

from __future__ import annotations

from typing import Any

from workers.config import EngineConfig
from workers.engine import scoring
from workers.engine.outputs import last_output
from workers.engine.plan import StepPlan, StepResult
from workers.engine.planner import Planner
from workers.engine.sequence import Sequence
from workers.engine.testing import FakeRunner, solo
from workers.protocol import Generate, SamplingParams, SequenceOutput

Choice = tuple[str, int]


def request(name: str, tokens: list[int] | int, max_tokens: int = 4, **fields: Any) -> Generate:
    """A request with seed 0. ``tokens``: a prompt, or the length of one that nobody else has."""
    if isinstance(tokens, int):
        start = sum(name.encode()) * 1000
        tokens = list(range(start, start + tokens))
    params = fields.pop("params", SamplingParams(seed=0, ignore_eos=True))
    fields.setdefault("scope", b"scope")
    return Generate(name, tokens, max_tokens, params, **fields)


class Drive:
    """One planner, one runner. Every step is checked; outputs are gathered per choice."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_size: int = 4,
        max_context: int = 100_000,
        vocab: int = 900,
        windows: tuple[int, ...] = (0,),
        twice_at: int = 0,
        **config: Any,
    ) -> None:
        self.vocab, self.twice_at = vocab, twice_at
        self.config = EngineConfig(block_size=block_size, **config)
        self.planner = Planner(
            self.config,
            blocks=blocks,
            max_context=max_context,
            revision="rev",
            eos_ids=[999],
            records=True,
            windows=windows,
            twice_at=twice_at,
        )
        budget = self.config.step_rows if self.config.kv_cache_reuse else None
        self.runner = FakeRunner(blocks, block_size, vocab=vocab, budget=budget, windows=windows)
        self.sent: dict[Choice, Generate] = {}
        self.tokens: dict[Choice, list[int]] = {}
        self.last: dict[Choice, SequenceOutput] = {}
        self.order: list[Choice] = []
        """Choices in the order in which they ended."""
        self.outputs: list[SequenceOutput] = []
        self.plans: list[StepPlan] = []
        self.now = 0

    def add(self, *requests: Generate) -> list[Sequence]:
        made: list[Sequence] = []
        for generate in requests:
            made = self.planner.add(generate, self.now)
            for sequence in made:
                self.sent[sequence.id, sequence.index] = generate
                if sequence.finish is not None:
                    self.take([last_output(sequence, [], [])])
        return made

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            choice = (output.id, output.index)
            assert choice not in self.last, f"{choice} speaks after its last output"
            line = self.tokens.setdefault(choice, [])
            line.extend(output.tokens)
            assert output.output_tokens == len(line)
            if output.finish is not None:
                self.last[choice] = output
                self.order.append(choice)
        self.outputs.extend(outputs)

    def step(self) -> StepPlan | None:
        self.now += 1_000_000
        roster = self.planner.roster
        preemptions, running = roster.preemptions, set(roster.running)
        plan = self.planner.plan(self.now)
        if plan is None:
            return None
        if roster.preemptions > preemptions and plan.chunks:
            assert running.issuperset(roster.running), "a step with a victim admits nobody"
        self.plans.append(plan)
        if self.config.kv_cache_reuse:
            self.bounded(plan, running)
        kinds = [chunk.is_decode for chunk in plan.chunks]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        self.ready(plan)
        if plan.runs:
            result = self.runner.run(plan)
        else:
            self.runner.zero_blocks(plan.zero)
            result = StepResult([])
        self.now += 1_000_000
        self.take(self.planner.commit(plan, result, self.now))
        self.check()
        return plan

    def bounded(self, plan: StepPlan, running: set[Sequence]) -> None:
        """No more rows than the budget and, beside decodes, no more work, but for the end of one prompt.

        ``running``: before the step.
        """
        budget, twice_at = self.config.max_step_tokens, self.twice_at
        decodes, prompts = [], []
        for chunk in plan.chunks:
            one = chunk.sequence
            again = one in running and one.high_water >= one.prompt_len
            ahead = chunk.known == 1 and chunk.start + 1 == len(one.tokens)
            (decodes if again and ahead else prompts).append(chunk)
        prompts.sort(key=lambda chunk: chunk.sequence.arrival)
        ends = bool(prompts) and prompts[-1].start + prompts[-1].known == len(prompts[-1].sequence.tokens)
        over = min(len(decodes), self.config.step_overrun)
        assert plan.tokens <= budget + ends * over
        for chunk in prompts[:-1]:
            whole = chunk.start + chunk.known == len(chunk.sequence.tokens)
            capped = chunk.count == self.config.max_chunk_tokens or scoring.pending(chunk.sequence)
            assert whole or capped, "who came later goes on before who came first"
        if twice_at and decodes and prompts:
            rows = budget - len(decodes)
            work = sum(chunk.known * (chunk.known + 2 * (twice_at + chunk.start)) for chunk in prompts)
            most = (rows + ends * over + twice_at) ** 2 - twice_at**2
            assert work <= most or (len(prompts) == 1 and prompts[0].count <= -(-rows // 4))

    def ready(self, plan: StepPlan) -> None:
        """A plan is about to run."""

    def check(self) -> None:
        """The books, between two steps."""
        self.planner.check()

    def cancel(self, name: str, index: int | None = None) -> None:
        self.take(self.planner.cancel(name, self.now, index))

    def run(self, limit: int = 20_000) -> None:
        """Until idle; then nothing may be left in use and every choice must equal its solo run."""
        for _ in range(limit):
            if self.step() is None:
                break
        else:
            raise AssertionError(f"not idle after {limit} steps")
        self.idle()

    def idle(self) -> None:
        pool = self.planner.pool
        assert len(self.planner) == 0
        assert len(self.planner.roster.waiting) == 0
        assert pool.used == 0
        assert pool.free + pool.cached == pool.total
        assert set(self.last) == set(self.sent)
        for choice, generate in self.sent.items():
            self.compare(choice, generate)

    def compare(self, choice: Choice, generate: Generate) -> None:
        seed = generate.params.seed
        assert seed is not None
        got, last = self.tokens[choice], self.last[choice]
        alone = solo(generate.tokens, generate.max_tokens, seed + choice[1], vocab=self.vocab)
        if last.finish == "length":
            assert got == alone
            if choice[1] == 0:
                assert last.prompt_cached + last.prompt_computed == len(generate.tokens)
        else:
            assert got == alone[: len(got)]
