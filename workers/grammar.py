"""Grammars over one model's vocabulary, by llguidance (MIT, https://github.com/guidance-ai/llguidance). No torch.

A grammar is text in llguidance's Lark dialect, where ``%json {…}`` embeds a JSON schema. It is compiled with the bytes
of the model's own tokens; a matcher then says after every token which tokens may follow, as a bit mask.

Rules
- The gateway's checking child (``workers/grammar_child.py``) and the worker compile with this very code and these
  limits from the same files: what passed there compiles here.
- Every piece of work is bounded: by ``LIMITS`` inside the library, and in the child by the clock.
- End tokens are allowed exactly where the grammar may end; other special tokens never.
- A matcher is used by one thread at a time. The library lets go of the interpreter lock while it works.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from workers import tokenizer_files as files

Mask = NDArray[np.uint32]

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)
MAX_ERROR_CHARS = 300
_HEADER = '%llguidance {"no_forcing": true}\n'
"""Forced text is left to the model, token by token: which of several ways to cut it into tokens is its choice."""
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_SOURCE = re.compile(r"\n +\d+ \| .*", re.DOTALL)


class GrammarError(ValueError):
    """The grammar cannot be used. The text is fit for its author; it quotes nobody else's."""


class Matcher:
    """Where one text stands in its grammar."""

    __slots__ = ("_inner", "_size")

    def __init__(self, inner: llguidance.LLMatcher, size: int) -> None:
        self._inner = inner
        self._size = size

    def fork(self) -> Matcher:
        """An independent matcher in the same state."""
        return Matcher(self._inner.deep_copy(), self._size)

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens. Raises GrammarError when they do not match or a limit is reached."""
        if not self._inner.consume_tokens(list(tokens)):
            raise GrammarError(_plain(self._inner.get_error()) or "the text does not match its grammar")

    def mask(self, into: Mask | None = None) -> Mask:
        """Which tokens may come next: bit ``i % 32`` of word ``i // 32``. Raises GrammarError at a limit."""
        mask = np.empty((self._size + 31) // 32, dtype=np.uint32) if into is None else into
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._inner.is_error():
            raise GrammarError(_plain(self._inner.get_error()))
        return mask

    @property
    def ended(self) -> bool:
        """Nothing but an end token may come."""
        return bool(self._inner.is_stopped())


class Vocabulary:
    """A model's tokens, ready to compile grammars against. May be used from several threads."""

    def __init__(self, tokens: list[bytes], special: Collection[int], eos: Collection[int], size: int) -> None:
        """``tokens``: bytes by id. ``size``: ids the model knows. Raises GrammarError for a model without an end."""
        ends = sorted(token for token in eos if 0 <= token < size)
        if not ends:
            raise GrammarError("this model has no end token, so no grammar can end its text")
        self.size = size
        table = [*tokens[:size], *([b""] * (size - len(tokens)))]
        self._inner = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(table, special, ends)), n_vocab=size, eos_token=ends
        )

    @classmethod
    def load(cls, directory: Path, *, eos: Collection[int] | None = None, size: int | None = None) -> Vocabulary:
        """From a model directory; ``eos`` and ``size`` overrule what its configs say.

        Raises OSError, ValueError (GrammarError among them).
        """
        path = directory / "tokenizer.json"
        document = files.parse_json(path.read_bytes(), path)
        config = files.read_json(directory / "config.json")
        tokens = files.vocabulary_bytes(document)
        ends = files.end_ids(files.read_json(directory / "generation_config.json"), config) if eos is None else eos
        size = size or files.size_of(config, "vocab_size") or len(tokens)
        return cls(tokens, files.special_ids(document), ends, size)

    def compile(self, grammar: str) -> Matcher:
        """A matcher at the grammar's beginning. Takes milliseconds, at worst seconds. Raises GrammarError."""
        inner = llguidance.LLMatcher(self._inner, _HEADER + grammar, log_level=0, limits=LIMITS)
        if inner.is_error():
            raise GrammarError(_plain(inner.get_error()))
        return Matcher(inner, self.size)


class _Tokens:
    """What llguidance asks of a tokenizer. Encoding is not among what is used: no text is ever forced."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Collection[int], ends: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = ends[0]

    def __call__(self, text: Any) -> list[int]:
        return []


def _plain(error: str) -> str:
    """The library's message without its quotation of the grammar, in one short line."""
    if error.startswith("NoExtensionBias"):  # the library's word for a grammar without any text
        return "no finite text matches it: a part that refers to itself must have an end"
    text = _SOURCE.sub("", _PLACE.sub("", error)).removeprefix("failed to compile JSON schema: ")
    return " ".join(text.split())[:MAX_ERROR_CHARS]
