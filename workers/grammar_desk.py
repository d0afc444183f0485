"""A worker's grammars: compiled once, kept, and every sequence's mask worked out beside the forward pass.

Rules
- The engine thread calls ``compile``, ``advance``, ``close`` and ``allowed``. One thread compiles, others make masks,
  so that a heavy grammar delays nobody's tokens.
- A sequence's matcher and mask belong to the mask thread from ``advance`` or ``look_ahead`` until its future is done,
  else to nobody. Each piece of work waits for the one before.
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
from typing import Any

from workers.engine.constraint import Compiled
from workers.engine.sequence import Sequence as EngineSequence
from workers.grammar import GrammarError, Mask, Matcher, Vocabulary

KEPT = 64
BEYOND = 1 << 30
Submit = Callable[[Callable[[], list[Mask]]], "Future[list[Mask]]"]
_log = logging.getLogger(__name__)


class Ahead:
    """A place that a sequence would reach by guesses (``workers.engine.constraint.Constraint``)."""

    __slots__ = ("_masks", "_place")

    def __init__(self, masks: Future[list[Mask]], place: int) -> None:
        self._masks, self._place = masks, place

    def allowed(self) -> memoryview | None:
        """See ``Constraint``. None, too, where the guesses before do not match the grammar."""
        masks = self._masks.result()
        return masks[self._place].data.cast("B") if self._place < len(masks) else None

    def look_ahead(self, tokens: Sequence[int]) -> list[Ahead]:
        """See ``Constraint``. Nothing is worked out beyond the guesses, so nothing is allowed there."""
        return [Ahead(self._masks, BEYOND) for _ in tokens]


class TokenConstraint:
    """One sequence's place in its grammar (``workers.engine.constraint.Constraint``)."""

    __slots__ = ("_busy", "_failed", "_mask", "_matcher", "_owned", "_pending", "_submit", "consumed")

    def __init__(self, matcher: Matcher, first: Mask, submit: Submit) -> None:
        """``first``: the mask at the beginning, shared by all that begin there and never written to. ``submit`` hands
        work to the mask threads, which begin it in order."""
        self._submit = submit
        self._busy: Future[Any] | None = None
        """The work on it that was begun last; the next waits for it. It was submitted before, so it runs or is done."""
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

    def look_ahead(self, tokens: Sequence[int]) -> list[Ahead]:
        """See ``Constraint``."""
        guesses, before = list(tokens), self._busy
        looking = self._submit(lambda: self._look(guesses, before))
        self._busy = looking
        return [Ahead(looking, place) for place in range(len(guesses))]

    def _look(self, tokens: list[int], before: Future[Any] | None) -> list[Mask]:
        """In a mask thread: the masks after each guess, up to one that is not allowed."""
        if before is not None:
            before.result()
        masks: list[Mask] = []
        if self._failed:
            return masks
        try:
            matcher = self._matcher.fork()
            for token in tokens:
                matcher.consume([token])
                masks.append(matcher.mask())
        except BaseException as error:  # a panic of the library is no Exception
            if not isinstance(error, GrammarError):
                _log.error("a grammar's mask failed (%s)", type(error).__name__)
        return masks

    def follow(self, pending: Future[None]) -> None:
        """The answer will be there when ``pending`` is done."""
        self._pending = self._busy = pending

    @property
    def busy(self) -> Future[Any] | None:
        """The work on it that was begun last."""
        return self._busy

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
        work: list[tuple[TokenConstraint, list[int], Future[Any] | None]] = []
        for sequence in sequences:
            constraint = sequence.constraint
            assert isinstance(constraint, TokenConstraint)
            new = sequence.tokens[sequence.prompt_len + constraint.consumed :]
            work.append((constraint, new, constraint.busy))
            constraint.consumed = sequence.output_len
        share = -(-len(work) // self._threads)
        for start in range(0, len(work), share):
            part = work[start : start + share]
            pending = self._masks.submit(_catch_up, part)
            for constraint, *_ in part:
                constraint.follow(pending)

    def close(self) -> None:
        """See ``Grammars``. What has not begun is dropped; nobody waits for it any more."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str, n: int, done: Callable[[Compiled], None]) -> None:
        try:
            matcher, first = self._prototype(grammar)
            made: Compiled = [TokenConstraint(matcher.fork(), first, self._masks.submit) for _ in range(n)]
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


def _catch_up(part: list[tuple[TokenConstraint, list[int], Future[Any] | None]]) -> None:
    for constraint, tokens, before in part:
        if before is not None:
            before.result()
        constraint.catch_up(tokens)
