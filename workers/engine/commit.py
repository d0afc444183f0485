"""Books the result of a step: computed tokens, forks, output, published blocks, ends.

Rules
- The result is checked against the plan before anything changes.
- A token is counted once: what lies below ``high_water`` is recompute and nobody's bill.
- A choice forks before its lead takes its own token: the lead may end with it and give the blocks back.
- A beam only tells its candidates; when the last of a search has, the search takes its turn. What beams produce is not
  published: most of it is given up.
- A block is published after the forward pass that filled it, so nobody can hit what was not computed.
- Of guesses, those that the runner accepted are computed tokens like others; what lies behind them is not computed, not
  counted and not published, and will be overwritten.
"""

from __future__ import annotations

from workers.engine import scoring
from workers.engine.beams import BeamSearch, assign
from workers.engine.drafting import Drafting
from workers.engine.outputs import ends, last_output, output
from workers.engine.plan import Chunk, Sampled, StepPlan, StepResult
from workers.engine.roster import Roster
from workers.engine.sequence import Sequence
from workers.protocol import FinishReason, SequenceOutput

MAX_DRY_STEPS = 8
"""So many steps without a token in a row, and a sequence ends with an error: it must not hang."""


class Commit:
    """Of the plans of one roster."""

    def __init__(self, roster: Roster, block_size: int, drafting: Drafting | None = None) -> None:
        self._drafting = drafting
        self._roster = roster
        self._size = block_size
        self._dry: dict[Sequence, int] = {}

    @property
    def dry(self) -> bool:
        """Whether some sequence got no token in its last step."""
        return bool(self._dry)

    def apply(self, plan: StepPlan, result: StepResult, now: int) -> list[SequenceOutput]:
        """What is new about each sequence of the plan. Raises ValueError when the result does not fit the plan."""
        sampled = result.sampled
        expected = sum(len(chunk.samplers) for chunk in plan.chunks)
        if len(sampled) != expected:
            raise ValueError(f"sampled: the runner returned {len(sampled)} results for {expected} samplers")
        if plan.scores:
            scoring.expect(plan, result)
        if self._drafting is not None:
            self._expect_drafts(plan, sampled)
            self._drafting.learn(plan, result, now - plan.started_ns)
        outputs: list[SequenceOutput] = []
        size, many = self._size, self._roster.many
        cursor = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if chunk.drafts:
                outputs.append(self._checked(chunk, sampled[cursor], now))
                if sequence.slid and many is not None:
                    many.slide(sequence)
                cursor += 1
                continue
            end = chunk.start + chunk.count
            sequence.computed = end
            if chunk.count == 1 and end > sequence.high_water and end > sequence.prompt_len:
                sequence.high_water = end
            else:
                self._count(plan, chunk, now)
            if end // size > sequence.published and sequence.chain is not None:
                self._publish(sequence, end // size)
            if sequence.slid and many is not None:  # a beam has none any more where another's part ended the search
                many.slide(sequence)
            samplers = chunk.samplers
            if sequence.search is not None and samplers:
                outputs += self._search(sequence, sequence.search, sampled[cursor], now)
                cursor += 1
                continue
            if not samplers:
                if not sequence.index:
                    outputs.append(output(sequence, [], []))
                continue
            if sequence.siblings:
                for child in samplers[1:]:
                    self._roster.fork(sequence, child)
                self._roster.dismount(sequence)
            for sampler in samplers:
                outputs.append(self._take(sampler, sampled[cursor], now))
                cursor += 1
        if plan.scores:
            scoring.book(plan, result, outputs)
        return outputs

    @staticmethod
    def _expect_drafts(plan: StepPlan, sampled: list[Sampled]) -> None:
        """Raises ValueError for tokens that are not some of the guesses and one more."""
        cursor = 0
        for chunk in plan.chunks:
            if chunk.drafts:
                tokens = sampled[cursor].tokens
                if tokens[:-1] != chunk.drafts[: max(0, len(tokens) - 1)]:
                    raise ValueError(f"sampled: {len(tokens)} tokens do not begin with the guesses that were checked")
            cursor += len(chunk.samplers)

    def _checked(self, chunk: Chunk, sampled: Sampled, now: int) -> SequenceOutput:
        """A decode with guesses: the known token was computed, and the guesses that were right."""
        sequence = chunk.sequence
        if chunk.start < sequence.high_water:
            self._roster.recomputed += 1
        sequence.computed = chunk.start + 1
        sequence.high_water = max(sequence.high_water, sequence.computed)
        told = self._take(sequence, sampled, now, guessed=True)
        accepted = min(len(told.tokens), max(0, len(sampled.tokens) - 1))
        assert self._drafting is not None
        self._drafting.count(accepted, len(chunk.drafts) - accepted)
        if sequence.record is not None:
            sequence.record.guessed(accepted, len(chunk.drafts) - accepted)
        return told

    def _count(self, plan: StepPlan, chunk: Chunk, now: int) -> None:
        """Account a chunk of the prompt, or one that is computed again."""
        sequence = chunk.sequence
        end, high, prompt = sequence.computed, sequence.high_water, sequence.prompt_len
        again = min(end, high) - chunk.start
        if again > 0:
            self._roster.recomputed += again
        if end > high:
            first = min(end, prompt) - min(high, prompt)
            sequence.prompt_computed += first
            sequence.high_water = end
            if first:
                self._roster.service.add(sequence.tenant_key, first)
        record = sequence.record
        if record is not None:
            if again > 0:
                record.recomputed += again
            record.chunk(plan.step, plan.started_ns, now, chunk.count)

    def _publish(self, sequence: Sequence, full: int) -> None:
        """Register the blocks that are full now. A key that exists already keeps its block."""
        chain = sequence.chain
        assert chain is not None
        if sequence.search is not None:
            full = min(full, sequence.prompt_len // self._size)
        keys, blocks = sequence.keys, sequence.blocks
        chain.extend(keys, sequence.tokens, full)
        publish = self._roster.pool.publish
        if self._roster.many is not None:
            self._roster.many.publish(sequence, full)
            return
        for index in range(sequence.published, full):
            publish(blocks[index], keys[index], public=chain.is_public(index))
        sequence.published = full

    def _take(self, sequence: Sequence, sampled: Sampled, now: int, *, guessed: bool = False) -> SequenceOutput:
        """Append what was sampled, up to the token that ends it. ``guessed``: all but the last are computed."""
        tokens = sampled.tokens
        if sampled.error is not None:
            self._dry.pop(sequence, None)
            self._roster.end(sequence, "error", now, sampled.error)
            return last_output(sequence, [], [])
        if not tokens:
            return self._none(sequence, now)
        if self._dry:
            self._dry.pop(sequence, None)
        known = sequence.tokens
        produced = len(known) - sequence.prompt_len
        finish = None
        for index, token in enumerate(tokens, 1):
            known.append(token)
            finish = ends(sequence, token, produced + index)
            if finish is not None:
                tokens = tokens[:index]
                break
        if guessed:
            sequence.computed = sequence.high_water = len(known) - 1
            if sequence.computed // self._size > sequence.published and sequence.chain is not None:
                self._publish(sequence, sequence.computed // self._size)
        logprobs = sampled.logprobs[: len(tokens)] if sampled.logprobs else []
        roster = self._roster
        roster.service.add(sequence.tenant_key, len(tokens))
        if not produced:
            sequence.first_token_ns = now
        record = sequence.record
        if record is not None:
            record.produced(now, len(tokens))
        if finish is None:
            return output(sequence, tokens, logprobs)
        roster.end(sequence, finish, now)
        return last_output(sequence, tokens, logprobs)

    def _search(self, beam: Sequence, search: BeamSearch, sampled: Sampled, now: int) -> list[SequenceOutput]:
        """One beam's part of a turn; the last one's takes it. News of the search, which is told under choice 0."""
        if beam.finish is not None:  # another beam's part ended the search
            return []
        if len(sampled.candidates) < search.candidates:
            return self._answered(search, now, "internal")
        if not search.tell(beam, sampled.candidates):
            return []
        roster, lead, billed = self._roster, search.lead, search.billed
        steps = search.turn()
        roster.service.add(beam.tenant_key, search.billed - billed)
        lead.first_token_ns = lead.first_token_ns or now
        for member in search.members:
            if member.record is not None:
                member.record.produced(now, 1)
        if not steps:
            return self._answered(search, now)
        for child in list(lead.siblings):
            roster.fork(lead, child)
        carried = assign(steps, search.members)
        for carrier, step in carried:
            if carrier is not step.parent:
                roster.take_over(carrier, step.parent)
        for carrier, step in carried:
            carrier.tokens.append(step.token)
        search.settle([(carrier, step.score) for carrier, step in carried])
        return [output(lead, [], [])]

    def _answered(self, search: BeamSearch, now: int, error: str | None = None) -> list[SequenceOutput]:
        """The search is over: its best answers, best first, or ``error`` for all."""
        news: list[SequenceOutput] = []
        answers = [] if error else search.answers
        for rank, member in enumerate(search.members):
            finish: FinishReason = "error" if error else "cancelled"
            if rank < len(answers):
                answer = answers[rank]
                finish = "stop" if answer.ended else "length"
                member.tokens[member.prompt_len :] = answer.tokens
            self._roster.end(member, finish, now, error)
            if not member.silent:
                news.append(last_output(member, member.output, []))
        return news

    def _none(self, sequence: Sequence, now: int) -> SequenceOutput:
        """No token came: its last known token is computed once more in the next step, a bounded number of times."""
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
        dry = self._dry.get(sequence, 0) + 1
        if dry < MAX_DRY_STEPS:
            self._dry = {one: steps for one, steps in self._dry.items() if one.finish is None}  # others were cancelled
            self._dry[sequence] = dry
            return output(sequence, [], [])
        self._dry.pop(sequence, None)
        self._roster.end(sequence, "error", now, "internal")
        return last_output(sequence, [], [])
