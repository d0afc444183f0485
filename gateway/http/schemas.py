"""Request bodies of ``/v1/chat/completions`` and ``/v1/completions``: bytes in, checked values out.

Rules
- A field is read (``_COMMON`` and below), refused because ignoring it would change the answer (``unsupported.py``), or
  unknown and ignored. Nothing here identifies the caller: ``user`` is carried as a label, ``tenant`` is never read.
- null means "not given". Every refusal is a 400 with ``param``.
- What needs the model (vocabulary, context) or the tenant (limits) is checked in ``gateway/intake.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from gateway.errors import bad_request
from gateway.http import unsupported
from gateway.http.beams import beams
from gateway.http.jsonfields import Field, between, read, read_any, scrap, split
from gateway.http.jsonfields import field as spec
from workers.protocol import Beams, SamplingParams

MAX_N = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_TOKENS = 2**31 - 1
ROLES = ("system", "developer", "user", "assistant", "tool")


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; its text parts are joined by line breaks."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What chats and completions have in common."""

    model: str
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    """Per choice; None = not given."""
    max_tokens_param: str = "max_tokens"
    """The field that gave it, for messages."""
    n: int = 1
    beams: Beams | None = None
    """Beam search for the ``n`` best answers."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Streams only: end with a usage chunk."""
    user: str | None = None
    """A label that the client chose; never an identity."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """Answers that are worked on at once: choices, or beams."""
        return self.n if self.beams is None else self.beams.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Request):
    """Body of ``/v1/chat/completions``."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Request):
    """Body of ``/v1/completions``: one prompt, as text or as token ids."""

    prompt: str | tuple[int, ...]


def parse_chat(raw: bytes) -> ChatRequest:
    """Parse and check a chat body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    _refuse_unsupported(fields, unsupported.CHAT)
    common = _common(fields, {"logprobs": _chat_logprobs(fields)})
    tokens, tokens_param = _max_tokens(fields)
    return ChatRequest(messages=_messages(fields), max_tokens=tokens, max_tokens_param=tokens_param, **common)


async def parse(how: Callable[[bytes], R], raw: bytes) -> R:
    """Run ``parse_chat`` or ``parse_completion``; a large body in a thread, so that the event loop never waits."""
    return how(raw) if len(raw) <= 64 * 1024 else await asyncio.to_thread(how, raw)


def parse_completion(raw: bytes) -> CompletionRequest:
    """Parse and check a completion body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    _refuse_unsupported(fields, unsupported.COMPLETION)
    common = _common(fields, {"logprobs": read(fields, "logprobs", _COMPLETION_LOGPROBS, None)})
    tokens, tokens_param = _max_tokens(fields)
    return CompletionRequest(prompt=_prompt(fields), max_tokens=tokens, max_tokens_param=tokens_param, **common)


# What every request may say -------------------------------------------------------------------------------------------


def _stops(value: str | list[str]) -> str | None:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > MAX_STOPS:
        return f"takes at most {MAX_STOPS} strings, got {len(stops)}"
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            return (
                f"strings must have 1 to {MAX_STOP_CHARS} characters, got one of {len(stop)}; leave 'stop' out for none"
            )
    return None


def _logit_bias(value: dict[str, float]) -> str | None:
    if len(value) > MAX_LOGIT_BIAS:
        return f"takes at most {MAX_LOGIT_BIAS} entries, got {len(value)}"
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            return f"keys must be token ids (whole numbers from 0), got {scrap(token)}"
        if not -100 <= bias <= 100:
            return f"values must be between -100 and 100, got {bias} for token {int(token)}"
    return None


def _metadata(value: dict[str, str]) -> str | None:
    if len(value) > 16:
        return f"takes at most 16 entries, got {len(value)}"
    if any(len(key) > 64 or len(entry) > 512 for key, entry in value.items()):
        return "keys may have at most 64 and values at most 512 characters"
    return None


def _model(value: str) -> str | None:
    return None if 1 <= len(value) <= 256 else f"must have 1 to 256 characters, got {len(value)}"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_MODEL = spec(str, _model)
_MAX_TOKENS = spec(int, between(1, MAX_TOKENS))
_COMPLETION_LOGPROBS: Field[int | None] = spec(int, between(0, 5))
_STREAM_OPTIONS = spec(_StreamOptions)

_SAMPLING: Mapping[str, Field[Any]] = {
    "temperature": spec(float, between(0, 2)),
    "top_p": spec(float, lambda value: None if 0 < value <= 1 else f"must be above 0 and at most 1, got {value}"),
    "top_k": spec(int, between(-1, 2**31 - 1, "0 or -1 = off")),
    "min_p": spec(float, between(0, 1)),
    "seed": spec(int, between(-(2**63), 2**63 - 1)),
    "presence_penalty": spec(float, between(-2, 2)),
    "frequency_penalty": spec(float, between(-2, 2)),
    "ignore_eos": spec(bool),
    "min_tokens": spec(int, between(0, MAX_TOKENS)),
}
_OTHER: Mapping[str, tuple[Field[Any], Any]] = {
    "n": (spec(int, between(1, MAX_N, "send several requests for more")), 1),
    "stream": (spec(bool), False),
    "user": (spec(str, lambda value: None if len(value) <= 512 else "may have at most 512 characters"), None),
    "metadata": (spec(dict[str, str], _metadata), {}),
}
_STOP = spec(str | list[str], _stops)
_LOGIT_BIAS = spec(dict[str, float], _logit_bias)


def _refuse_unsupported(fields: Mapping[str, msgspec.Raw], table: Mapping[str, unsupported.Unsupported]) -> None:
    for name in fields:
        if name in table and not table[name].accepts(read_any(fields, name)):
            raise bad_request(f"{name} is not supported: {table[name].why}.", param=name, code="unsupported_parameter")


def _common(fields: Mapping[str, msgspec.Raw], extra_params: Mapping[str, Any]) -> dict[str, Any]:
    model = read(fields, "model", _MODEL, "")
    if not model:
        raise bad_request("model is missing. GET /v1/models lists the names.", param="model")
    params = {name: value for name, how in _SAMPLING.items() if (value := read(fields, name, how, None)) is not None}
    params["top_k"] = max(0, params.get("top_k", 0))
    bias = read(fields, "logit_bias", _LOGIT_BIAS, {})
    params["logit_bias"] = {int(token): value for token, value in bias.items()}
    stop = read(fields, "stop", _STOP, [])
    common = {name: read(fields, name, how, default) for name, (how, default) in _OTHER.items()}
    options = read(fields, "stream_options", _STREAM_OPTIONS, None)
    if options is not None and not common["stream"]:
        raise bad_request("stream_options is only allowed with stream: true.", param="stream_options")
    return common | {
        "model": model,
        "beams": beams(fields, common["n"]),
        "params": SamplingParams(**params, **extra_params),
        "stop": (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop)),
        "include_usage": options is not None and bool(options.include_usage),
    }


def _max_tokens(fields: Mapping[str, msgspec.Raw]) -> tuple[int | None, str]:
    old = read(fields, "max_tokens", _MAX_TOKENS, None)
    new = read(fields, "max_completion_tokens", _MAX_TOKENS, None)
    if old is not None and new is not None and old != new:
        raise bad_request(
            f"max_tokens ({old}) and max_completion_tokens ({new}) contradict each other; send one of them.",
            param="max_completion_tokens",
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


# Chat -----------------------------------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


_MESSAGES = spec(
    list[_Message],
    lambda value: None if 1 <= len(value) <= MAX_MESSAGES else f"takes 1 to {MAX_MESSAGES} messages, got {len(value)}",
)
_TOP_LOGPROBS: Field[int | None] = spec(int, between(0, 20))
_LOGPROBS = spec(bool)


def _chat_logprobs(fields: Mapping[str, msgspec.Raw]) -> int | None:
    wanted = read(fields, "logprobs", _LOGPROBS, False)
    top = read(fields, "top_logprobs", _TOP_LOGPROBS, None)
    if not wanted and top:
        raise bad_request("top_logprobs needs logprobs: true.", param="top_logprobs")
    return (top or 0) if wanted else None


def _messages(fields: Mapping[str, msgspec.Raw]) -> tuple[Message, ...]:
    messages = read(fields, "messages", _MESSAGES, None)
    if messages is None:
        raise bad_request("messages is missing; send a list of {role, content} objects.", param="messages")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _message(path: str, message: _Message) -> Message:
    if message.role not in ROLES:
        raise bad_request(
            f"{path}.role must be one of {', '.join(ROLES)}, got {scrap(message.role)}.", param=f"{path}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name) not in (None, []):
            why = unsupported.CHAT["tools" if name != "audio" else "audio"].why
            raise bad_request(
                f"{path}.{name} is not supported: {why}.", param=f"{path}.{name}", code="unsupported_parameter"
            )
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_part(f"{path}.content[{i}]", part, message.role) for i, part in enumerate(content))
    elif content is None:
        if message.role != "assistant":
            raise bad_request(f"{path}.content is missing; send a string or text parts.", param=f"{path}.content")
        content = ""
    return Message(message.role, content)


def _part(path: str, part: _Part, role: str) -> str:
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    if part.type not in kinds:
        raise bad_request(
            f"{path}.type must be 'text', got {scrap(part.type)}: only text goes in and out.", param=f"{path}.type"
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise bad_request(f"{path}.{part.type} is missing; send a string.", param=f"{path}.{part.type}")
    return text


# Completions ----------------------------------------------------------------------------------------------------------

_PROMPT = spec(str | list[int | str | list[int]])
_MANY = "prompt takes one prompt per request, got {}; send one request per prompt (they share the batch anyway)."


def _prompt(fields: Mapping[str, msgspec.Raw]) -> str | tuple[int, ...]:
    prompt = read(fields, "prompt", _PROMPT, None)
    if prompt is None:
        raise bad_request("prompt is missing; send a string or a list of token ids.", param="prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise bad_request(_MANY.format(len(prompt)), param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    for i, token in enumerate(prompt):
        if not isinstance(token, int):
            raise bad_request(
                f"prompt[{i}]: expected a token id like the others before it; "
                "send one string or one list of token ids, not a mixture.",
                param=f"prompt[{i}]",
            )
    if not prompt:
        raise bad_request("prompt is empty; send at least one token id or a string.", param="prompt")
    return tuple(prompt)
