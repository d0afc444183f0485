"""What the engine needs to know of grammars: which tokens may come next, and who finds out. No grammar library here.

Rules
- A constraint is a function of its sequence's output: "consumed catches up with known", like computed tokens do. So
  preemption, a failed step and a choice that runs later change nothing about it.
- The engine thread alone asks ``allowed`` and calls ``advance``; threads of the implementation do the work between.
  They begin when a step is booked and have the next forward pass to finish; only ``allowed`` waits for what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from workers.engine.sequence import Sequence as EngineSequence


class Constraint(Protocol):
    """Of one sequence."""

    def allowed(self) -> memoryview | None:
        """Bit ``i % 8`` of byte ``i // 8`` says whether token ``i`` may come next; ids beyond the end may not.

        None when the grammar has failed: the sequence can have no token. Waits until the answer is there.
        """
        ...

    def look_ahead(self, tokens: Sequence[int]) -> Sequence[Constraint]:
        """What would be allowed after the first of these guesses, after two …; changes nothing, never blocks.

        Behind a guess that the grammar forbids nothing is.
        """
        ...


Compiled = Sequence[Constraint] | None
"""One constraint per choice; None for a grammar that does not compile."""


class Grammars(Protocol):
    """Compiles grammars and keeps constraints up to date, in threads of its own."""

    def compile(self, grammar: str, n: int, done: Callable[[Compiled], None]) -> None:
        """Make ``n`` constraints and hand them to ``done``, which is called once, from any thread."""
        ...

    def advance(self, sequences: Sequence[EngineSequence]) -> None:
        """These have new output: begin to work out what may follow. Never blocks."""
        ...

    def close(self) -> None:
        """End the threads."""
        ...
