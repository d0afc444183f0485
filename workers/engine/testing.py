"""A runner without a model that checks every plan against a memory of its own. For tests, and tools that need no text.

``FakeRunner`` keeps, for every slot of every block, which token at which position was written there, under which scope
and adapter. Before it samples it reads each sequence back through its block table. So a wrong block table, a copy on
write forgotten, a prefix hit on the wrong content, a block published too early or handed out twice, and a foreign
tenant's block all fail at the step that is to blame. The next token is a hash of all tokens so far, read from that
memory: any schedule must give the same tokens as running alone (``solo``).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from zlib import crc32

from workers.engine import scoring
from workers.engine.beams import Candidate
from workers.engine.plan import Chunk, Sampled, StepPlan, StepResult
from workers.engine.sequence import Sequence
from workers.engine.verify import fold, standings
from workers.protocol import SamplingParams, TokenLogprob


class PlanError(AssertionError):
    """The plan is wrong: the planner's or the pool's mistake."""


@dataclass(frozen=True, slots=True)
class Slot:
    """What one slot of a block holds."""

    token: int
    position: int
    scope: bytes
    adapter: str | None
    table: int = 0


def next_token(tokens: list[int], seed: int, vocab: int) -> int:
    """A token that depends on every token before it and on the sequence's seed."""
    return crc32(array("q", tokens).tobytes(), seed & 0xFFFFFFFF) % vocab


def likelihood(tokens: list[int]) -> float:
    """A made-up log probability of the last token, that depends on every token before it."""
    return -(crc32(array("q", tokens).tobytes()) % 97) / 97


def candidates(tokens: list[int], count: int, vocab: int) -> list[Candidate]:
    """``count`` tokens with made-up log probabilities, likeliest first, that depend on every token before them."""
    start = crc32(array("q", tokens).tobytes())
    spread = 0.05 + (start >> 8) % 97 / 97
    return [((start + 7 * rank) % vocab, -spread * (rank + 1)) for rank in range(count)]


def solo(
    prompt: list[int], max_tokens: int, seed: int, *, vocab: int = 1000, eos: frozenset[int] = frozenset()
) -> list[int]:
    """The output of a sequence that runs alone: what any schedule must produce."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, seed, vocab))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Implements ``Runner``. ``blocks`` × ``block_size`` slots; samples token ids below ``vocab``.

    Raises PlanError at the first plan that breaks a rule. ``budget``: most rows a plan may have, None = not checked.
    ``windows``: of the block tables; what lies before a row's window is not read back, and may be gone.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        vocab: int = 1000,
        budget: int | None = None,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        self.windows = windows
        self.block_size = block_size
        self.vocab = vocab
        self.budget = budget
        self.slots: list[list[Slot | None]] = [[None] * block_size for _ in range(blocks)]
        self.steps = 0
        self.rows = 0
        """Rows computed, over all steps."""
        self.copies = 0
        self.host: dict[int, list[Slot | None]] = {}
        """What host slots hold, for plans that move blocks (``tiers.py``)."""
        self.restores = 0
        self._step = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Zero, copy, write, read back, sample."""
        self._expect(plan.step > self._step, f"step {plan.step} follows step {self._step}")
        self._step = plan.step
        self._expect(plan.runs, "a plan without chunks or moves must not run")
        if self.budget is not None:
            self._expect(plan.tokens <= self.budget, f"{plan.tokens} rows exceed the budget of {self.budget}")
        self._move(plan)
        self._copy(plan.copies)
        self._write(plan.chunks)
        sampled: list[Sampled] = []
        scores: list[list[TokenLogprob]] = []
        for chunk in plan.chunks:
            line = self._read(chunk)
            if scored := scoring.rows(chunk):
                self._expect(plan.scores, "a prompt is scored in a plan that does not say so")
                ends = range(chunk.start + scored.start + 1, chunk.start + scored.stop + 1)
                known = chunk.sequence.tokens  # the last row scores a token that is not computed yet
                scores.append([TokenLogprob(known[end], likelihood([*line[:end], known[end]])) for end in ends])
            for sampler in chunk.samplers:
                known = line[: chunk.start + chunk.known]
                self._expect(len(known) == len(sampler.tokens), "sampled before all was computed")
                self._expect(sampler.tokens == known, "a choice samples from another's tokens")
                if not chunk.drafts:
                    sampled.append(self.sample(sampler, line))
            if chunk.drafts:
                rows = standings(chunk)
                found = [self.sample(row, line[: len(row.tokens)]) for row in rows]
                sampled += fold([chunk], found)
        self.steps += 1
        self.rows += plan.tokens
        return StepResult(sampled, scores)

    def sample(self, sequence: Sequence, line: list[int]) -> Sampled:
        """The next token after ``line``, the tokens as memory holds them; for a beam its candidates."""
        if sequence.search is not None:
            return Sampled([], candidates=candidates(line, sequence.search.candidates, self.vocab))
        return Sampled([next_token(line, sequence.seed, self.vocab)])

    def zero_blocks(self, blocks: list[int]) -> None:
        """Forget what these blocks hold."""
        for block in blocks:
            self.slots[block] = [None] * self.block_size

    def holds(self, scope: bytes) -> int:
        """How many slots hold something of ``scope``."""
        return sum(slot is not None and slot.scope == scope for block in self.slots for slot in block)

    def _move(self, plan: StepPlan) -> None:
        """Save, zero, restore: who gave way and comes back in the same plan, since nothing else runs, finds its own."""
        saved = [slot for _, slot in plan.saves]
        self._expect(len(saved) == len(set(saved)), "two blocks saved into one slot")
        targets = [block for _, block in plan.restores]
        self._expect(len(targets) == len(set(targets)), "two slots restored into one block")
        for block, slot in plan.saves:
            self.host[slot] = list(self.slots[block])
        self.zero_blocks(plan.zero)
        for slot, block in plan.restores:
            self._expect(slot in self.host, f"slot {slot} was never filled")
            self.slots[block] = list(self.host[slot])
        self.restores += len(plan.restores)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        targets = [target for _, target in copies]
        self._expect(len(targets) == len(set(targets)), "two copies into one block")
        read = [list(self.slots[source]) for source, _ in copies]
        for target, content in zip(targets, read, strict=True):
            self.slots[target] = content
        self.copies += len(copies)

    def _write(self, chunks: list[Chunk]) -> None:
        size = self.block_size
        written: set[tuple[int, int]] = set()
        seen: set[Sequence] = set()
        for chunk in chunks:
            sequence = chunk.sequence
            self._expect(sequence not in seen, "a sequence has two chunks in one step")
            seen.add(sequence)
            self._expect(chunk.count > 0, "an empty chunk")
            tokens = sequence.tokens[: chunk.start + chunk.known] + chunk.drafts
            self._expect(chunk.start + chunk.count == len(tokens), "computes unknown tokens")
            self._expect(not chunk.drafts or len(sequence.tokens) == chunk.start + 1, "guesses what is known")
            self._expect(sequence.finish is None, "computes a finished sequence")
            held = sequence.held()
            self._expect(len(held) == len(set(held)), "one block twice in a table")
            for number, table in enumerate(self._tables(sequence)):
                self._expect(len(table) * size >= chunk.start + chunk.count, "writes past its blocks")
                for position in range(chunk.start, chunk.start + chunk.count):
                    place = (table[position // size], position % size)
                    self._expect(place[0] >= 0, "writes a block that was given back")
                    self._expect(place not in written, f"two sequences write slot {place}")
                    written.add(place)
                    self.slots[place[0]][place[1]] = Slot(
                        tokens[position], position, sequence.scope, sequence.adapter, number
                    )

    def _read(self, chunk: Chunk) -> list[int]:
        """The sequence's tokens up to the chunk's end, read through its block tables as far as windows reach."""
        sequence = chunk.sequence
        tokens = sequence.tokens[: chunk.start + chunk.known] + chunk.drafts
        end = chunk.start + chunk.count
        line = list(tokens)
        for number, table in enumerate(self._tables(sequence)):
            window = self.windows[number]
            for position in range(max(0, chunk.start + 1 - window) if window else 0, end):
                index = position // self.block_size
                self._expect(table[index] >= 0, "reads a block that was given back")
                slot = self.slots[table[index]][position % self.block_size]
                wanted = (position, tokens[position], number)
                if slot is None or (slot.position, slot.token, slot.table) != wanted:
                    raise PlanError(f"{sequence.id}[{sequence.index}] position {position}: block holds {slot}")
                public = sequence.chain is not None and sequence.chain.is_public(index)
                self._expect(slot.adapter == sequence.adapter, "reads another adapter's block")
                self._expect(public or slot.scope == sequence.scope, "reads another scope's block")
                line[position] = slot.token
        return line

    def _tables(self, sequence: Sequence) -> list[list[int]]:
        tables = sequence.tables()
        self._expect(len(tables) == len(self.windows), f"{len(tables)} tables, the model has {len(self.windows)}")
        return tables

    @staticmethod
    def _expect(holds: bool, message: str) -> None:
        if not holds:
            raise PlanError(message)


def expected(prompt: list[int], max_tokens: int, params: SamplingParams, index: int, *, vocab: int = 1000) -> list[int]:
    """``solo`` for choice ``index`` of a request with a seed."""
    if params.seed is None:
        raise ValueError("seed: give the request a seed, or its tokens cannot be foretold")
    return solo(prompt, max_tokens, params.seed + index, vocab=vocab)
