"""Token counts for a model whose tokenizer is not here: that of an upstream, which tells the true count at the end.

Rules
- A "token" is four bytes of UTF-8, about what tokens of English are. Its id is those bytes as a number, so that texts
  with the same beginning have the same ids, and prefix keys mean what they mean with a real tokenizer.
- It only measures. Nothing is ever decoded with it: an upstream answers with text.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from workers.tokenizer import EncodeError

BYTES_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
"""What a chat template adds around one message, roughly."""
_FRAME = 2**32 - 1
"""The id of what a template adds; not four bytes of any text."""


class EstimatedTokenizer:
    """A ``gateway.served.TextTokenizer`` that estimates."""

    vocab_size = 2**32
    """Any id that a caller sends as a prompt is the upstream's own; only it knows better."""

    def encode_text(self, text: str, *, prefix: bool = True) -> list[int]:
        """One id per four bytes; nothing stands in front. Raises EncodeError for text that is no Unicode."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise EncodeError("the text holds an unpaired surrogate (\\ud800 … \\udfff); send valid Unicode") from error
        words = array("I", data + bytes(-len(data) % BYTES_PER_TOKEN))
        if sys.byteorder == "big":
            words.byteswap()
        return words.tolist()

    tool_template = ""
    """It knows no template; a described tool is as long as a native one."""

    def control_token(self, text: str) -> int | None:
        """None: no text is known to be a token."""
        return None

    def encode_chat(self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None) -> list[int]:
        """The contents one after the other, each in a frame of ``TOKENS_PER_MESSAGE``. Raises EncodeError."""
        ids: list[int] = []
        for message in messages:
            ids += [_FRAME] * (TOKENS_PER_MESSAGE - 1)
            ids += self.encode_text(message["role"][:BYTES_PER_TOKEN])
            ids += self.encode_text(message["content"])
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Nothing: an upstream sends the bytes of its tokens along."""
        return b""

    def decoder(self, shown: Iterable[int] = ()) -> EstimatedDecoder:
        """A decoder for one answer, which has nothing to decode."""
        return EstimatedDecoder()


class EstimatedDecoder:
    """A ``gateway.choices.Decoder`` for answers that come as text."""

    def push(self, token: int) -> str:
        """Nothing."""
        return ""

    def finish(self) -> str:
        """Nothing."""
        return ""
