"""Text ↔ token ids with the model's own ``tokenizer.json``. No torch.

Rules
- What a caller wrote never becomes a control token: contents are encoded by a second tokenizer that does not know them.
  The template's own text is encoded with them (``workers.chat_template`` keeps the two apart).
- Contents and template text are encoded separately, so no token spans the border between them. Byte-level BPE cuts
  there anyway, but for white space: a content that begins with a line break or spaces, after a template that ends with
  a line break, may give one token more than Hugging Face's encoding of the joined string. The characters are the same.
- Encoding goes through ``encode_batch``, which releases the interpreter lock (``encode`` does not). Everything here is
  synchronous: callers hand texts above ``INLINE_CHARS`` to a thread.
- Immutable after ``load``; may be used from several threads.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from workers import tokenizer_files as files
from workers.chat_template import ChatTemplate, ChatTemplateError, Segment

__all__ = ["INLINE_CHARS", "ChatTemplateError", "EncodeError", "IncrementalDecoder", "Segment", "Tokenizer"]

_UTF8 = codecs.getincrementaldecoder("utf-8")
INLINE_CHARS = 4096
"""Up to so many characters encoding takes about a millisecond; longer texts belong into a thread."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class EncodeError(ValueError):
    """The text cannot be encoded. Fit for a caller; quotes nothing."""


class Tokenizer:
    """One model's tokenizer, chat template and the ids that matter. Made by ``load``."""

    def __init__(
        self, document: files.Json, config: files.Json, model: files.Json, generation: files.Json, template: str | None
    ) -> None:
        """From the parsed files; ``load`` reads them. Raises ValueError where they contradict each other."""
        self.sha256 = ""
        """Hex digest of ``tokenizer.json``: what a worker's Hello must match."""
        self.eos_ids = files.end_ids(generation, model)
        """Ids that end an answer."""
        self.special_ids = files.special_ids(document)
        """Ids that have no text in an answer."""
        self.control_ids = frozenset(files.control_tokens(document).values())
        """Ids that text of a caller never becomes."""
        self.max_context = files.size_of(model, "max_position_embeddings")
        """Longest sequence of the model, in tokens, where its config says so."""
        self._bytes = files.vocabulary_bytes(document)
        self.vocab_size = files.size_of(model, "vocab_size") or len(self._bytes)
        """Number of ids that the model knows; valid ids are below it."""
        self._strips = files.strips_first_space(document)
        self._markup = _build(document)
        self._plain = _build(files.plain_document(document))
        inner = files.prefixless_document(document)
        self._markup_inner = self._markup if inner is None else _build(inner)
        self._plain_inner = self._plain if inner is None else _build(files.plain_document(inner))
        self._check_kept(document)
        specials = files.special_texts(config)
        self._prefix = self._find_prefix(config, specials)
        self._template = None if template is None else ChatTemplate(template, specials)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, the configs and the chat template beside it.

        Raises FileNotFoundError, and ValueError for a tokenizer or template that is not supported.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        data = path.read_bytes()
        document = files.parse_json(data, path)
        config, model, generation = (
            files.read_json(directory / f"{name}.json") for name in ("tokenizer_config", "config", "generation_config")
        )
        template = files.read_chat_template(directory, config)
        try:
            files.check_kind(document, path)
            tokenizer = cls(document, config, model, generation, template)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path}, or a config beside it, is not built as it should be ({what})") from error
        tokenizer.sha256 = hashlib.sha256(data).hexdigest()
        return tokenizer

    # -- text to ids ----------------------------------------------------------------------------------------------

    def encode_text(self, text: str, *, special: bool = False, prefix: bool = True) -> list[int]:
        """Ids of a raw prompt, with what the model wants in front (``prefix``: its begin token, if any).

        ``special`` lets control tokens be written in ``text``; never set it for text of a caller. Raises EncodeError.
        """
        return self.encode_batch([text], special=special, prefix=prefix)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False, prefix: bool = True) -> list[list[int]]:
        """``encode_text`` of several texts at once, on all cores. Raises EncodeError."""
        front = self._prefix if prefix else []
        return [front + ids for ids in self._encode(self._markup if special else self._plain, texts, special)]

    @property
    def tool_template(self) -> str:
        """The chat template's source, if it takes ``tools``; else empty."""
        return "" if self._template is None else self._template.tools_source

    def control_token(self, text: str) -> int | None:
        """The id of a special token with this text, which has none in an answer; None where there is no such token."""
        token = self._markup.token_to_id(text)
        return token if token in self.special_ids else None

    def chat_segments(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = True
    ) -> list[Segment]:
        """A chat in the model's own form, template text and contents apart. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        return self._template.segments(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of a rendered chat: control tokens only from the template's own segments. Raises EncodeError."""
        markup = iter(self._encode(self._markup_inner, [piece.text for piece in segments if piece.markup], True))
        plain = iter(self._encode(self._plain_inner, [piece.text for piece in segments if not piece.markup], False))
        ids: list[int] = []
        for piece in segments:
            ids.extend(next(markup if piece.markup else plain))
        return ids

    def encode_chat(self, messages: Messages, *, tools: Tools | None = None) -> list[int]:
        """``encode_segments(chat_segments(...))``. Raises ChatTemplateError, EncodeError."""
        return self.encode_segments(self.chat_segments(messages, tools=tools))

    # -- ids to text ----------------------------------------------------------------------------------------------

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to an answer, which may be a part of a character; empty for unknown ids."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def decoder(self, shown: Iterable[int] = ()) -> IncrementalDecoder:
        """A decoder for one answer, in which the special tokens among ``shown`` have their text."""
        return IncrementalDecoder(self, shown)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of an answer, without special tokens; U+FFFD for bytes that are no UTF-8."""
        decoder = self.decoder()
        return decoder.feed(tokens) + decoder.finish()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _encode(self, tokenizer: tokenizers.Tokenizer, texts: Sequence[str], special: bool) -> list[list[int]]:
        if not texts:
            return []
        try:
            encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise EncodeError("the text holds an unpaired surrogate (\\ud800 … \\udfff); send valid Unicode") from error
        encoded: list[list[int]] = [encoding.ids for encoding in encodings]
        if not special and not all(self.control_ids.isdisjoint(ids) for ids in encoded):
            raise EncodeError("the text holds a control token of the model; leave it out")
        return encoded

    def _check_kept(self, document: files.Json) -> None:
        """The plain tokenizers must give every other added token the id it has."""
        for token in document.get("added_tokens", ()):
            for plain in (self._plain, self._plain_inner):
                if token["id"] not in self.control_ids and plain.token_to_id(token["content"]) != token["id"]:
                    raise ValueError(f"tokenizer.json: added token {token['id']} has another id in the vocabulary")

    def _find_prefix(self, config: files.Json, specials: Mapping[str, str]) -> list[int]:
        """What the tokenizer puts before a raw prompt."""
        bare = self._markup.encode("a", add_special_tokens=False).ids
        full = self._markup.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if start and full[start : start + len(bare)] == bare:
                return list(full[:start])
        begin = self._markup.token_to_id(specials["bos_token"]) if "bos_token" in specials else None
        return [begin] if begin is not None and config.get("add_bos_token") else []


class IncrementalDecoder:
    """One answer's tokens → text, as they come: what ``push`` and ``finish`` return adds up to ``Tokenizer.decode``.

    Never half a character: bytes of one that is incomplete wait for the next token, at most three. Special tokens have
    no text. O(1) per token, amortised.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Iterable[int] = ()) -> None:
        self._bytes = tokenizer._bytes
        self._special = tokenizer.special_ids.difference(shown) if shown else tokenizer.special_ids
        self._strip = tokenizer._strips
        self._utf8 = _UTF8("replace")

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete, or for a special token."""
        if token in self._special or not 0 <= token < len(self._bytes):
            return ""
        data = self._bytes[token]
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def feed(self, tokens: Iterable[int]) -> str:
        """``push`` of several tokens."""
        return "".join(map(self.push, tokens))

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


def _build(document: files.Json) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer.json is not usable: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
