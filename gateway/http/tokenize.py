"""``/tokenize`` and ``/detokenize`` in the shape that vLLM gave them: bodies in, finished answers out.

Rules
- Token ids are those that a chat or completion with the same text would send to the model: what a caller writes never
  becomes a control token.
- A text that could be no prompt is refused uncounted, by the bound that prompts have: encoding 4 MB takes seconds.
- The gateway answers by itself. The functions here are synchronous and may be run in a thread; they raise ApiError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.callforms import form_of
from gateway.errors import ApiError, bad_request
from gateway.http import common
from gateway.http.jsonfields import Field, read, split
from gateway.http.jsonfields import field as spec
from gateway.http.schemas import CHAT_FIELDS, Message, read_messages
from gateway.http.unsupported import CHAT, Unsupported
from gateway.output_budget import Context
from workers.tokenizer import ChatTemplateError, EncodeError, Tokenizer

if TYPE_CHECKING:
    from gateway.models import ModelHandle

_PROMPT: Field[str | None] = spec(str, doc="The text; or send 'messages'.")
_FLAG = spec(bool)
_TOKENS: Field[list[int] | None] = spec(list[int], doc="Token ids.")

TOKENIZE_FIELDS: Mapping[str, Field[Any]] = {
    "model": common.MODEL,
    "prompt": _PROMPT,
    "messages": CHAT_FIELDS["messages"],
    "add_special_tokens": _FLAG,
    "add_generation_prompt": _FLAG,
    "return_token_strs": _FLAG,
}
DETOKENIZE_FIELDS: Mapping[str, Field[Any]] = {"model": common.MODEL, "tokens": _TOKENS}
UNSUPPORTED: Mapping[str, Unsupported] = {
    name: CHAT[name]
    for name in ("chat_template", "chat_template_kwargs", "continue_final_message", "documents", "mm_processor_kwargs")
} | {"tools": Unsupported("tokens of tools cannot be counted here", ([],))}

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Body of ``/tokenize``: a text or a chat, not both."""

    model: str
    prompt: str | None
    messages: tuple[Message, ...]
    add_special_tokens: bool = True
    """What the model wants in front of a text; a chat's template brings it."""
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @property
    def text_chars(self) -> int:
        """Characters of text."""
        return len(self.prompt or "") + sum(message.chars for message in self.messages)

    @property
    def chars(self) -> int:
        """What it costs, in characters."""
        return len(self.prompt or "") + sum(message.cost for message in self.messages)


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Body of ``/detokenize``."""

    model: str
    tokens: tuple[int, ...]

    @property
    def chars(self) -> int:
        """What it costs, in characters."""
        return len(self.tokens)


def parse_tokenize(raw: bytes) -> TokenizeRequest:
    """Parse and check a body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    common.refuse_unsupported(fields, UNSUPPORTED)
    model = common.read_model(fields)
    prompt = read(fields, "prompt", _PROMPT, None)
    chat = read(fields, "messages", CHAT_FIELDS["messages"], None) is not None
    if (prompt is not None) == chat:
        raise bad_request("Send either 'prompt', a string, or 'messages', a chat.", param="prompt")
    flags = {
        name: read(fields, name, _FLAG, default)
        for name, default in (
            ("add_special_tokens", True),
            ("add_generation_prompt", True),
            ("return_token_strs", False),
        )
    }
    return TokenizeRequest(model, prompt, read_messages(fields) if chat else (), **flags)


def parse_detokenize(raw: bytes) -> DetokenizeRequest:
    """Parse and check a body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    model = common.read_model(fields)
    tokens = read(fields, "tokens", _TOKENS, None)
    if tokens is None:
        raise bad_request("tokens is missing; send a list of token ids.", param="tokens")
    return DetokenizeRequest(model, tuple(tokens))


def tokenize(request: TokenizeRequest, model: ModelHandle) -> bytes:
    """The answer's JSON. Raises ApiError 400 for text that is no Unicode or too long, 503 while the model is loaded."""
    tokenizer = _tokenizer(model)
    param = "prompt" if request.prompt is not None else "messages"
    Context(model.max_context, "the model's context").refuse_text(request.text_chars, param)
    try:
        if request.prompt is not None:
            tokens = tokenizer.encode_text(request.prompt, prefix=request.add_special_tokens)
        else:
            template = tokenizer.tool_template
            messages, _ = form_of(template).laid_out(request.messages, (), template)
            segments = tokenizer.chat_segments(messages, add_generation_prompt=request.add_generation_prompt)
            tokens = tokenizer.encode_segments(segments)
    except (ChatTemplateError, EncodeError) as error:
        text = str(error)
        raise bad_request(f"{text[:1].upper()}{text[1:]}.", param=param) from None
    strings = [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    return _encode(
        {
            "count": len(tokens),
            "max_model_len": model.max_context,
            "tokens": tokens,
            "token_strs": strings if request.return_token_strs else None,
        }
    )


def detokenize(request: DetokenizeRequest, model: ModelHandle) -> bytes:
    """The answer's JSON: the text, control tokens included. Raises ApiError 400 for ids it does not have."""
    tokenizer = _tokenizer(model)
    vocab = tokenizer.vocab_size
    wrong = next((i for i, token in enumerate(request.tokens) if not 0 <= token < vocab), None)
    if wrong is not None:
        raise bad_request(
            f"tokens[{wrong}]: {request.tokens[wrong]} is no token id of this model; its ids are 0 to {vocab - 1}.",
            param=f"tokens[{wrong}]",
        )
    return _encode({"prompt": b"".join(map(tokenizer.token_bytes, request.tokens)).decode(errors="replace")})


def _tokenizer(model: ModelHandle) -> Tokenizer:
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, Tokenizer):
        raise _elsewhere(model.name)
    return tokenizer


def _elsewhere(model: str) -> ApiError:
    return bad_request(
        f"The tokenizer of {model[:128]!r} is not here: other servers run that model. Ask for one that runs here.",
        param="model",
        code="no_tokenizer",
    )
