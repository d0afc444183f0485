"""Many decode-only steps at once: for the simulator, whose runner knows beforehand how long every step takes.

Rules
- A stretch is a row of steps in each of which every running sequence gets one token and nothing else happens: nobody
  ends, nobody is admitted, nobody gives way. ``length`` says how many such steps come next for certain.
- ``advance(k)`` leaves planner, pool, prefix index and counters as ``k`` rounds of ``plan`` and ``commit`` would have:
  blocks are taken in the order in which the steps would have taken them.
- What is drawn must not end a sequence. The step in which one ends goes through ``plan`` and ``commit``.
- A real worker never uses it: its runner has to run every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from workers.engine.outputs import output
from workers.engine.planner import Planner
from workers.engine.roster import MAX_PREEMPTIONS, Roster
from workers.engine.sequence import Sequence
from workers.protocol import SequenceOutput

Draw = Callable[[Sequence, int], list[int]]
"""The next tokens of a sequence, that many."""
Left = Callable[[Sequence], int]
"""How many tokens a sequence will still produce, the last one included."""


def until_max_tokens(sequence: Sequence) -> int:
    """Tokens left when only ``max_tokens`` ends a sequence."""
    return sequence.max_tokens - sequence.output_len


MAX_STEPS = 1 << 20


class Stretch:
    """Of one planner, between its steps."""

    def __init__(self, planner: Planner, *, left: Left = until_max_tokens) -> None:
        self._planner = planner
        self._left = left

    def length(self) -> tuple[int, bool]:
        """Steps of a stretch that may begin now, 0 when the next step must be planned; and whether one more is known.

        That one ends a sequence and is otherwise the same: it gives every running sequence one token. O(running).
        """
        planner = self._planner
        roster = planner.roster
        running = roster.running
        if not running or not planner.steady or not planner.limits.tables.plain:
            return 0, False
        last = min(map(self._left, running))
        steps = min(self._undisturbed(), last)
        if steps < 1:
            return 0, False
        ref, size = planner.pool.ref, planner.limits.block_size
        for sequence in running:
            computed = sequence.computed
            if len(sequence.tokens) - computed != 1 or sequence.high_water < sequence.prompt_len or sequence.record:
                return 0, False
            if sequence.siblings or sequence.search is not None or computed < sequence.prompt_len:
                return 0, False
            index = computed // size
            if index < len(sequence.blocks) and ref[sequence.blocks[index]] > 1:
                return 0, False
        steps = self._affordable(steps)
        return (steps - 1, True) if steps == last else (steps, False)

    def advance(self, steps: int, draw: Draw, *, silent: bool = False) -> list[SequenceOutput]:
        """Do ``steps`` of them, at most ``length()``; what is new about each sequence, in order of arrival.

        ``silent``: make no outputs, since those of the step that follows at once say it all.
        """
        planner = self._planner
        roster = planner.roster
        running = roster.running
        size = planner.limits.block_size
        head = roster.waiting.head()
        asks = planner.config.mode == "continuous" or roster.waiting.returned
        wanted = sorted(
            (index * size - sequence.computed, rank)
            for rank, sequence in enumerate(running)
            for index in range(len(sequence.blocks), -(-(sequence.computed + steps) // size))
        )
        left = planner.pool.available - bisect_left(wanted, (1, 0))
        for _, rank in wanted:
            block = roster.grow(running[rank])
            if block < 0:
                raise RuntimeError(f"{steps} steps are more than the blocks allow; ask length() first")
            running[rank].blocks.append(block)
        outputs: list[SequenceOutput] = []
        for sequence in running:
            tokens = draw(sequence, steps)
            sequence.tokens.extend(tokens)
            sequence.computed += steps
            sequence.high_water = sequence.computed
            roster.service.add(sequence.tenant_key, steps)
            full = sequence.computed // size
            if sequence.chain is not None and full > sequence.published:
                planner.publish(sequence, full)
            if not silent:
                outputs.append(output(sequence, tokens, []))
        if head is not None and asks and roster.room(head) and len(running) < planner.config.max_step_tokens:
            planner.passed(head, planner.step + 1, planner.step + steps, left)
        planner.step += steps
        return outputs

    def _undisturbed(self) -> int:
        """For how many steps nothing but the running sequences asks for anything, while only they go on."""
        planner = self._planner
        config, roster = planner.config, planner.roster
        if planner.pool.dirty or not config.kv_cache_reuse or len(roster.running) > config.max_step_tokens:
            return 0
        head = roster.waiting.head()
        if head is None or not roster.room(head):
            return MAX_STEPS
        if config.mode == "static" and not roster.waiting.returned:
            return MAX_STEPS
        return MAX_STEPS if self._blocked(head) else 0

    def _blocked(self, head: Sequence) -> bool:
        """Whether the head of the line waits for blocks; then it goes on waiting, since only fewer come to be there.

        One with prefix keys may find its blocks among those that are published meanwhile, and promises shift what is
        there for whom: not said of these.
        """
        roster = self._planner.roster
        if head.chain is not None or head.preemptions >= MAX_PREEMPTIONS or roster.promised:
            return False
        return self._planner.pool.available < roster.level(head)

    def _affordable(self, steps: int) -> int:
        """The largest number up to ``steps`` for which nobody has to give way."""
        if self._fits(steps):
            return steps
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(middle):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, steps: int) -> bool:
        planner = self._planner
        roster: Roster = planner.roster
        size = planner.limits.block_size
        spare = planner.pool.available - roster.promised
        for sequence in roster.running:
            more = -(-(sequence.computed + steps) // size) - len(sequence.blocks)
            if more > 0:
                spare -= max(0, more - roster.promise(sequence))
                if spare < 0:
                    return False
        return True
