"""What making a job needs of a model and of its tokenizer (``intake.py``), as Protocols: an estimate will do too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gateway.choices import Decoder


class TextTokenizer(Protocol):
    """What is needed of ``workers.tokenizer.Tokenizer``."""

    @property
    def vocab_size(self) -> int:
        """Valid ids are below it."""
        ...

    def encode_text(self, text: str, *, prefix: bool = True) -> list[int]:
        """Ids of a raw prompt, with what the model wants in front (``prefix``). Raises EncodeError."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Ids of a chat in the model's template. Raises ChatTemplateError, EncodeError."""
        ...

    @property
    def tool_template(self) -> str:
        """The chat template's source, if it takes ``tools``; else empty."""
        ...

    def control_token(self, text: str) -> int | None:
        """The id of a token that has no text in an answer. None for any other text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        ...

    def decoder(self, shown: Iterable[int] = ()) -> Decoder:
        """A decoder for one answer, in which these control tokens have their text."""
        ...


class ServedModel(Protocol):
    """What is needed of ``gateway.models.ModelHandle``."""

    @property
    def name(self) -> str:
        """What clients ask for."""
        ...

    @property
    def tokenizer(self) -> TextTokenizer:
        """Its tokenizer. Raises ApiError 503 while it is being loaded."""
        ...

    @property
    def revision(self) -> str:
        """What the prefix keys are made with."""
        ...

    @property
    def max_context(self) -> int:
        """Longest prompt + output in tokens."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def default_max_tokens(self) -> int:
        """Output length when a request names none."""
        ...

    def offers(self, endpoint: str) -> bool:
        """Whether a worker runs requests to this endpoint."""
        ...

    @property
    def directory(self) -> Path | None:
        """Where its files are; None for a model that has none here."""
        ...
