"""A worker's grammars: compiled once, kept, and every sequence's mask worked out beside the forward pass.

Rules
- The engine thread calls ``compile``, ``advance``, ``close`` and ``allowed``. One thread compiles, others make masks,
  so that a heavy grammar delays nobody's tokens.
- A sequence's matcher and mask belong to the mask thread from ``advance`` until its future is done, else to nobody.
- Compiled grammars are kept, at most ``KEPT`` (least recently used go first): prototypes that are forked, never moved.
- A grammar that fails on the way (a limit of the library) fails its sequence only.
- The vocabulary is read when the first grammar comes: who uses none pays nothing.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from workers.engine.constraint import Compiled
from workers.engine.sequence import Sequence as EngineSequence
from workers.grammar import GrammarError, Mask, Matcher, Vocabulary

KEPT = 64
_log = logging.getLogger(__name__)


class TokenConstraint:
    """One sequence's place in its grammar (``workers.engine.constraint.Constraint``)."""

    __slots__ = ("_failed", "_mask", "_matcher", "_owned", "_pending", "consumed")

    def __init__(self, matcher: Matcher, first: Mask) -> None:
        """``first``: the mask at the beginning, shared by all that begin there and never written to."""
        self.consumed = 0
        """Output tokens that were handed to the matcher."""
        self._matcher = matcher
        self._mask = first
        self._owned = False
        self._failed = False
        self._pending: Future[None] | None = None

    def allowed(self) -> memoryview | None:
        """See ``Constraint``."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return None if self._failed else self._mask.data.cast("B")

    def follow(self, pending: Future[None]) -> None:
        """The answer will be there when ``pending`` is done."""
        self._pending = pending

    def catch_up(self, tokens: list[int]) -> None:
        """In a mask thread: take the tokens, make the mask. A failure is kept, not raised."""
        if self._failed:
            return
        try:
            self._matcher.consume(tokens)
            self._mask = self._matcher.mask(self._mask if self._owned else None)
            self._owned = True
        except BaseException as error:  # a panic of the library is no Exception
            if not isinstance(error, GrammarError):
                _log.error("a grammar's mask failed (%s)", type(error).__name__)
            self._failed = True


class GrammarDesk:
    """One worker's (``workers.engine.constraint.Grammars``)."""

    def __init__(self, load: Callable[[], Vocabulary], *, threads: int | None = None) -> None:
        """``load`` reads the vocabulary, once, in the compiler's thread. ``threads`` make masks."""
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[str, tuple[Matcher, Mask]] = OrderedDict()
        self._threads = threads or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._masks = ThreadPoolExecutor(self._threads, thread_name_prefix="mask")

    def compile(self, grammar: str, n: int, done: Callable[[Compiled], None]) -> None:
        """See ``Grammars``."""
        self._compiler.submit(self._compile, grammar, n, done)

    def advance(self, sequences: Sequence[EngineSequence]) -> None:
        """See ``Grammars``."""
        work: list[tuple[TokenConstraint, list[int]]] = []
        for sequence in sequences:
            constraint = sequence.constraint
            assert isinstance(constraint, TokenConstraint)
            work.append((constraint, sequence.tokens[sequence.prompt_len + constraint.consumed :]))
            constraint.consumed = sequence.output_len
        share = -(-len(work) // self._threads)
        for start in range(0, len(work), share):
            part = work[start : start + share]
            pending = self._masks.submit(_catch_up, part)
            for constraint, _ in part:
                constraint.follow(pending)

    def close(self) -> None:
        """See ``Grammars``. What has not begun is dropped; nobody waits for it any more."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str, n: int, done: Callable[[Compiled], None]) -> None:
        try:
            matcher, first = self._prototype(grammar)
            made: Compiled = [TokenConstraint(matcher.fork(), first) for _ in range(n)]
        except GrammarError:
            made = None
        except BaseException as error:  # a grammar may cost its request, never the worker
            _log.error("compiling a grammar failed (%s)", type(error).__name__)
            made = None
        done(made)

    def _prototype(self, grammar: str) -> tuple[Matcher, Mask]:
        found = self._kept.get(grammar)
        if found is None:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            matcher = self._vocabulary.compile(grammar)
            found = matcher.fork(), matcher.mask()
            self._kept[grammar] = found
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return found


def _catch_up(part: list[tuple[TokenConstraint, list[int]]]) -> None:
    for constraint, tokens in part:
        constraint.catch_up(tokens)
