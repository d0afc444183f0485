"""Request bodies of ``/v1/chat/completions`` and ``/v1/completions``: bytes in, checked values out.

Rules
- A field is read (``common.py`` and below), refused because ignoring it would change the answer (``unsupported.py``),
  or unknown and ignored. Nothing here identifies the caller: ``user`` is carried as a label, ``tenant`` is never read.
- ``CHAT_FIELDS`` and ``COMPLETION_FIELDS`` name every field that is read; the OpenAPI document is made of them.
- null means "not given". Every refusal is a 400 with ``param``.
- What needs the model (vocabulary, context) or the tenant (limits) is checked in ``gateway/intake.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec.structs import replace as with_fields

from gateway.errors import bad_request
from gateway.grammars import Schema, json_text, tool_text
from gateway.http import beams, common, toolfields, unsupported
from gateway.http.jsonfields import Field, between, checked, read, scrap, split
from gateway.http.jsonfields import field as spec
from gateway.http.ranking import best_of
from gateway.http.structure import RESPONSE_FORMAT, JsonFormat, response_format
from gateway.toolbox import Toolbox, ToolCall
from workers.protocol import Beams, SamplingParams

MAX_MESSAGES = 4096
PART_CHARS = 64
"""What rendering one message or call costs, in characters of encoding."""
FEATURES = ("tools", "logprobs", "n", "json_schema")
"""What a tenant may be refused (``features``)."""
ROLES = ("system", "developer", "user", "assistant", "tool")


R = TypeVar("R")
CallGrammar = Callable[[Toolbox, Schema | None], str]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; its text parts are joined by line breaks."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of the assistant."""
    tool_call_id: str | None = None
    """Of a tool's result: the call that it answers."""

    @property
    def chars(self) -> int:
        """Characters that the model reads of it at least."""
        return len(self.content) + sum(len(call.name) + len(call.arguments) for call in self.tool_calls)

    @property
    def cost(self) -> int:
        """What rendering and encoding it costs, in characters of encoding: many empty ones are work, too."""
        return self.chars + PART_CHARS * (1 + len(self.tool_calls))


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar (``gateway/grammars.py``), and the field that a caller mends when it does not compile."""

    grammar: str
    param: str


EndpointName = Literal["chat", "completions", "embeddings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What chats and completions have in common."""

    content_param: ClassVar[str]
    """The field that holds the text, for messages."""
    endpoint: ClassVar[EndpointName]
    """What a worker must offer to run it."""

    model: str
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    """Per choice; None = not given."""
    max_tokens_param: str = "max_tokens"
    """The field that gave it, for messages."""
    n: int = 1
    beams: Beams | None = None
    """Beam search for the ``n`` best answers."""
    drawn: int | None = None
    """Answers to draw for the ``n`` best of them; None = ``n``."""
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Streams only: end with a usage chunk."""
    user: str | None = None
    """A label that the client chose; never an identity."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    response_format: JsonFormat | None = None
    """The shape of the answer; None = any text."""

    def constraint(self, calls: CallGrammar = tool_text) -> Constraint | None:
        """What the answer's text must match; ``calls`` makes the grammar where it may call tools."""
        form = self.response_format
        return None if form is None else Constraint(json_text(form.schema), form.param)

    def features(self) -> frozenset[str]:
        """Which of ``FEATURES`` it uses, for authorisation."""
        used = set()
        if self.response_format is not None:
            used.add("json_schema")
        if self.params.logprobs is not None:
            used.add("logprobs")
        if self.lines > 1:
            used.add("n")
        return frozenset(used)

    @property
    def lines(self) -> int:
        """Answers that are worked on at once: choices, or beams."""
        return (self.drawn or self.n) if self.beams is None else self.beams.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Request):
    """Body of ``/v1/chat/completions``."""

    content_param: ClassVar[str] = "messages"
    endpoint: ClassVar[EndpointName] = "chat"
    messages: tuple[Message, ...]
    toolbox: Toolbox | None = None

    def constraint(self, calls: CallGrammar = tool_text) -> Constraint | None:
        """What the answer's text must match; ``calls`` makes the grammar where it may call tools."""
        box, form = self.toolbox, self.response_format
        if box is None or not box.shown:
            return Request.constraint(self)
        return Constraint(calls(box, None if form is None else form.schema), "tools")

    def features(self) -> frozenset[str]:
        """Which of ``FEATURES`` it uses, for authorisation."""
        return Request.features(self) | ({"tools"} if self.toolbox is not None else set())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Request):
    """Body of ``/v1/completions``: one prompt, as text or as token ids."""

    content_param: ClassVar[str] = "prompt"
    endpoint: ClassVar[EndpointName] = "completions"
    prompt: str | tuple[int, ...]
    echo: bool = False
    """Begin each answer with the prompt."""


def parse_chat(raw: bytes) -> ChatRequest:
    """Parse and check a chat body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    common.refuse_unsupported(fields, unsupported.CHAT)
    shared = _shared(fields, {"logprobs": _chat_logprobs(fields)})
    if shared["beams"] is None:
        common.refuse_unsupported(fields, unsupported.UNRANKED)
    box = toolfields.toolbox(fields)
    if box is not None and box.shown:
        refuse_endless(shared["params"], "tools")
    return ChatRequest(messages=read_messages(fields), toolbox=box, **shared)


async def parse(how: Callable[[bytes], R], raw: bytes) -> R:
    """Run ``parse_chat`` or ``parse_completion``; a large body in a thread, so that the event loop never waits."""
    return how(raw) if len(raw) <= 64 * 1024 else await asyncio.to_thread(how, raw)


def parse_completion(raw: bytes) -> CompletionRequest:
    """Parse and check a completion body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    common.refuse_unsupported(fields, unsupported.COMPLETION)
    shared = _shared(fields, {"logprobs": read(fields, "logprobs", _COMPLETION_LOGPROBS, None)}, common.COUNT_OR_NONE)
    if shared["beams"] is None:
        shared["drawn"] = best_of(fields, shared["n"], stream=shared["stream"])
    echo = read(fields, "echo", _ECHO, False)
    if echo and shared["params"].logprobs is not None:
        shared["params"] = with_fields(shared["params"], prompt_logprobs=True)
    if shared["max_tokens"] == 0:
        _check_prompt_alone(shared, echo=echo)
    return CompletionRequest(prompt=_prompt(fields), echo=echo, **shared)


# Chats and completions ------------------------------------------------------------------------------------------------


def _shared(
    fields: Mapping[str, msgspec.Raw], extra_params: Mapping[str, Any], count: Field[Any] = common.COUNT
) -> dict[str, Any]:
    shared = common.read_common(fields, extra_params)
    shared["n"] = read(fields, "n", common.N, 1)
    shared["beams"] = beams.beams(fields, shared["n"])
    shared["response_format"] = response_format(fields)
    if shared["response_format"] is not None:
        refuse_endless(shared["params"], "response_format")
    options = read(fields, "stream_options", common.STREAM_OPTIONS, None)
    if options is not None and not shared["stream"]:
        raise bad_request("stream_options is only allowed with stream: true.", param="stream_options")
    shared["include_usage"] = options is not None and bool(options.include_usage)
    shared["max_tokens"], shared["max_tokens_param"] = _max_tokens(fields, count)
    return shared


def refuse_endless(params: SamplingParams, param: str) -> None:
    """A grammar says where its text may end; nothing else may forbid that. Raises ApiError 400."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(params, name):
            raise bad_request(f"{name} cannot be combined with {param}: the format decides where its text ends.", name)


def _max_tokens(fields: Mapping[str, msgspec.Raw], count: Field[Any]) -> tuple[int | None, str]:
    old: int | None = read(fields, "max_tokens", count, None)
    new: int | None = read(fields, "max_completion_tokens", count, None)
    if old is not None and new is not None and old != new:
        raise bad_request(
            f"max_tokens ({old}) and max_completion_tokens ({new}) contradict each other; send one of them.",
            param="max_completion_tokens",
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


_SHARED: Mapping[str, Field[Any]] = {
    **common.FIELDS,
    **beams.FIELDS,
    "response_format": RESPONSE_FORMAT,
    "n": common.N,
    "stream_options": common.STREAM_OPTIONS,
    "max_tokens": common.COUNT,
    "max_completion_tokens": common.COUNT,
}


# Chat -----------------------------------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


class _Message(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | list[_Part] | None = None
    tool_calls: list[toolfields.Called] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


_MESSAGES = spec(
    list[_Message],
    checked(
        lambda value: (
            None if 1 <= len(value) <= MAX_MESSAGES else f"takes 1 to {MAX_MESSAGES} messages, got {len(value)}"
        ),
        {"minItems": 1, "maxItems": MAX_MESSAGES},
    ),
)
_TOP_LOGPROBS: Field[int | None] = spec(int, between(0, 20))
_LOGPROBS = spec(bool)

CHAT_FIELDS: Mapping[str, Field[Any]] = {
    "messages": _MESSAGES,
    **_SHARED,
    **toolfields.FIELDS,
    "logprobs": _LOGPROBS,
    "top_logprobs": _TOP_LOGPROBS,
}


def _chat_logprobs(fields: Mapping[str, msgspec.Raw]) -> int | None:
    wanted = read(fields, "logprobs", _LOGPROBS, False)
    top = read(fields, "top_logprobs", _TOP_LOGPROBS, None)
    if not wanted and top:
        raise bad_request("top_logprobs needs logprobs: true.", param="top_logprobs")
    return (top or 0) if wanted else None


def read_messages(fields: Mapping[str, msgspec.Raw]) -> tuple[Message, ...]:
    """The messages of a chat. Raises ApiError 400."""
    messages = read(fields, "messages", _MESSAGES, None)
    if messages is None:
        raise bad_request("messages is missing; send a list of {role, content} objects.", param="messages")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def _message(path: str, message: _Message) -> Message:
    if message.role not in ROLES:
        raise bad_request(
            f"{path}.role must be one of {', '.join(ROLES)}, got {scrap(message.role)}.", param=f"{path}.role"
        )
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            why = unsupported.CHAT[name].why
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
    if message.tool_calls and message.role != "assistant":
        raise bad_request(f"{path}.tool_calls belongs to messages of the assistant.", param=f"{path}.tool_calls")
    calls = toolfields.calls(f"{path}.tool_calls", message.tool_calls)
    return Message(message.role, content, calls, message.tool_call_id if message.role == "tool" else None)


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

_PROMPT = spec(str | list[int | str | list[int]], doc="One text, or one list of token ids.")
_COMPLETION_LOGPROBS: Field[int | None] = spec(int, between(0, 5))

_ECHO = spec(bool, doc="Begin each answer with the prompt; with logprobs, its tokens have theirs too.")

COMPLETION_FIELDS: Mapping[str, Field[Any]] = {
    "prompt": _PROMPT,
    **_SHARED,
    "logprobs": _COMPLETION_LOGPROBS,
    "echo": _ECHO,
    "max_tokens": common.COUNT_OR_NONE,
    "max_completion_tokens": common.COUNT_OR_NONE,
}


def _check_prompt_alone(shared: Mapping[str, Any], *, echo: bool) -> None:
    """No output is asked for: that makes sense where the prompt is told. Raises ApiError 400."""
    param = shared["max_tokens_param"]
    if not echo:
        raise bad_request(
            f"{param}: 0 leaves nothing to answer with; send echo: true to get the prompt with its log probabilities.",
            param=param,
        )
    for name in ("beams", "drawn", "response_format"):
        if shared[name] is not None:
            what = {"beams": "use_beam_search", "drawn": "best_of"}.get(name, name)
            raise bad_request(f"{what} needs output; leave it out, or send a {param} above 0.", param=what)


_TOKENS = frozenset({int})
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
    if not {*map(type, prompt)} <= _TOKENS:
        i = next(i for i, token in enumerate(prompt) if not isinstance(token, int))
        raise bad_request(
            f"prompt[{i}]: expected a token id like the others before it; "
            "send one string or one list of token ids, not a mixture.",
            param=f"prompt[{i}]",
        )
    if not prompt:
        raise bad_request("prompt is empty; send at least one token id or a string.", param="prompt")
    return tuple(prompt)
