"""``/v1/responses``, one turn at a time: its body, and answers in exactly the Responses API's shapes.

Rules
- Nothing is kept between turns: ``store: true``, ``previous_response_id``, ``conversation`` and ``background`` get 400.
- A turn is a chat: ``instructions`` are its first message, the messages of ``input`` follow. So queue, limits and cache
  treat it as one.
- Events of a stream are typed and numbered from 0, and the last one holds the whole response: ``response.completed``,
  or ``response.incomplete`` where the output ran into its limit. There is no ``[DONE]``.
- A stream that fails ends with ``response.failed`` and an ``error`` event, which the official client raises.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec

from gateway.choices import Alternative, ChoiceDelta, ScoredToken
from gateway.errors import ApiError, bad_request
from gateway.grammars import ANY_OBJECT
from gateway.http import common, sse, unsupported
from gateway.http.jsonfields import Field, between, checked, read, scrap, split
from gateway.http.jsonfields import field as spec
from gateway.http.openai import Answer, Format, Json, finite
from gateway.http.schemas import MAX_MESSAGES, ChatRequest, Message, refuse_endless
from gateway.http.structure import JsonFormat, NamedSchema, json_format
from gateway.http.unsupported import Unsupported
from policies.types import Usage

ROLES = ("system", "developer", "user", "assistant")
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""The second is asked for by habit; there is no reasoning to include."""

_STATELESS = "nothing is kept between requests; send the whole conversation as 'input'"
_OUTPUT = "responses take 'max_output_tokens'"

UNSUPPORTED: Mapping[str, Unsupported] = {
    **unsupported.CHAT,
    "store": Unsupported(_STATELESS, (False,)),
    "previous_response_id": Unsupported(_STATELESS),
    "conversation": Unsupported(_STATELESS),
    "background": Unsupported("a response is made while its caller waits; stream it", (False,)),
    "prompt": Unsupported("there are no stored prompts; send 'instructions' and 'input'"),
    "messages": Unsupported("responses take 'input'; send 'messages' to /v1/chat/completions"),
    "max_tokens": Unsupported(_OUTPUT),
    "max_completion_tokens": Unsupported(_OUTPUT),
    "use_beam_search": Unsupported("beam search is there for chats and completions", (False,)),
    "best_of": Unsupported("there is one response per request", (1,)),
    "n": Unsupported("there is one response per request; send several requests for more", (1,)),
    "logprobs": Unsupported(f"responses take 'top_logprobs' and 'include': [{LOGPROBS!r}]", (False,)),
    "response_format": Unsupported("responses take 'text': {'format': …}", ({"type": "text"}, {})),
    "tools": Unsupported("tools are not implemented for responses; use /v1/chat/completions", ([],)),
    "tool_choice": Unsupported("tools are not implemented for responses", ("none", "auto")),
    "reasoning": Unsupported("reasoning effort cannot be set", ({}, {"effort": None}, {"effort": "none"})),
    "truncation": Unsupported("input is never cut silently; shorten it before sending", ("disabled",)),
    "context_management": Unsupported("input is never cut silently; shorten it before sending", ([],)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """Body of ``/v1/responses``."""

    content_param: ClassVar[str] = "input"
    instructions: str | None = None
    top_logprobs: int = 0


class _Part(msgspec.Struct):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["input_text", "output_text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    role: Annotated[str | None, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})] = None
    content: str | list[_Part] | None = None
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["message"]})] = "message"


class _TextFormat(NamedSchema):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})] = "text"


class _Text(msgspec.Struct):
    format: _TextFormat | None = None


def _input(value: str | list[_Item]) -> str | None:
    if isinstance(value, list) and not 1 <= len(value) <= MAX_MESSAGES:
        return f"takes a text or 1 to {MAX_MESSAGES} messages, got {len(value)}"
    return None


def _include(value: list[str]) -> str | None:
    wrong = next((name for name in value if name not in INCLUDABLE), None)
    return None if wrong is None else f"can hold {', '.join(INCLUDABLE)}, got {scrap(wrong)}"


_INPUT = spec(str | list[_Item], _input, "A text, or the messages of the conversation so far.")
_INSTRUCTIONS = spec(str, doc="A system message before the input.")
_TOP_LOGPROBS = spec(int, between(0, 20))
_INCLUDE = spec(list[str], checked(_include, {"items": {"type": "string", "enum": list(INCLUDABLE)}}))
_TEXT = spec(_Text)

FIELDS: Mapping[str, Field[Any]] = {
    "input": _INPUT,
    **common.FIELDS,
    "instructions": _INSTRUCTIONS,
    "max_output_tokens": common.COUNT,
    "top_logprobs": _TOP_LOGPROBS,
    "include": _INCLUDE,
    "text": _TEXT,
}
"""Every field that is read; the OpenAPI document is made of them."""


def parse_responses(raw: bytes) -> ResponsesRequest:
    """Parse and check a body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    common.refuse_unsupported(fields, UNSUPPORTED)
    top: int = read(fields, "top_logprobs", _TOP_LOGPROBS, 0)
    wanted = top or LOGPROBS in read(fields, "include", _INCLUDE, [])
    shared = common.read_common(fields, {"logprobs": top if wanted else None})
    shape = _shape(read(fields, "text", _TEXT, _Text()).format or _TextFormat())
    if shape is not None:
        refuse_endless(shared["params"], "text.format")
    instructions: str | None = read(fields, "instructions", _INSTRUCTIONS, None)
    first = () if instructions is None else (Message("system", instructions),)
    return ResponsesRequest(
        messages=(*first, *_messages(fields)),
        instructions=instructions,
        max_tokens=read(fields, "max_output_tokens", common.COUNT, None),
        max_tokens_param="max_output_tokens",
        top_logprobs=top,
        response_format=shape,
        **shared,
    )


def _shape(asked: _TextFormat) -> JsonFormat | None:
    """The answer's shape; None for any text. Raises ApiError 400."""
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return JsonFormat(ANY_OBJECT, "text.format", {"type": "json_object"})
    if asked.type != "json_schema":
        raise bad_request(
            f"text.format.type must be text, json_object or json_schema, got {scrap(asked.type)}.",
            param="text.format.type",
        )
    named = NamedSchema(asked.name, asked.schema, asked.strict, asked.description)
    return json_format(named, "text.format")


def _messages(fields: Mapping[str, msgspec.Raw]) -> Iterable[Message]:
    value: str | list[_Item] | None = read(fields, "input", _INPUT, None)
    if value is None:
        raise bad_request("input is missing; send a string or a list of messages.", param="input")
    if isinstance(value, str):
        return [Message("user", value)]
    return [_message(f"input[{i}]", item) for i, item in enumerate(value)]


def _message(path: str, item: _Item) -> Message:
    if item.type != "message":
        raise bad_request(
            f"{path}.type must be 'message', got {scrap(item.type)}: other items are not implemented.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    if item.role not in ROLES:
        raise bad_request(
            f"{path}.role must be one of {', '.join(ROLES)}, got {scrap(item.role or '')}.", param=f"{path}.role"
        )
    if item.content is None:
        raise bad_request(f"{path}.content is missing; send a string or text parts.", param=f"{path}.content")
    if isinstance(item.content, str):
        return Message(item.role, item.content)
    texts = (_part(f"{path}.content[{i}]", part) for i, part in enumerate(item.content))
    return Message(item.role, "\n".join(texts))


def _part(path: str, part: _Part) -> str:
    if part.type not in ("input_text", "output_text", "refusal"):
        raise bad_request(
            f"{path}.type must be 'input_text', got {scrap(part.type)}: only text goes in and out.",
            param=f"{path}.type",
        )
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise bad_request(f"{path}.{name} is missing; send a string.", param=f"{path}.{name}")
    return text


class ResponsesFormat(Format):
    """``/v1/responses``. One message with one text part."""

    prefix = "resp"
    object = "response"
    chunk_object = "response"

    def __init__(self, *, job_id: str, request: ResponsesRequest, created: int, **base: Any) -> None:
        super().__init__(job_id=job_id, request=request, created=created, **base)
        self.id = f"resp_{job_id}"
        self._item_id = f"msg_{job_id}"
        self._request = request
        self._created = created
        self._events = 0
        self._answer = Answer(0)
        """What a stream has said so far."""

    # -- in one piece ---------------------------------------------------------------------------------------------

    def full(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """The response object. Raises ValueError for an answer that did not end well."""
        (answer,) = answers
        return self._response(self._status(answer), [self._item(answer)], usage)

    def _response(self, status: str, output: list[Json], usage: Usage | None = None, error: Json | None = None) -> Json:
        request = self._request
        return {
            "id": self.id,
            "object": self.object,
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_tokens,
            "metadata": dict(request.metadata),
            "model": self._base["model"],
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.params.temperature,
            "text": {"format": _format_body(request.response_format)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": request.top_logprobs,
            "top_p": request.params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage_body(usage),
            "user": request.user,
        }

    def _status(self, answer: Answer) -> str:
        return "incomplete" if self._reason(answer) == "length" else "completed"

    def _item(self, answer: Answer, status: str | None = None) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status or self._status(answer),
            "content": [self._part(answer)],
        }

    def _part(self, answer: Answer) -> Json:
        return {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": _scores(answer.scored)}

    # -- as a stream ----------------------------------------------------------------------------------------------

    def stream(self, deltas: Iterable[ChoiceDelta]) -> bytes:
        """The opening events with the first output, a delta per output, the closing events of the text with its end."""
        return b"".join(self._told(delta) for delta in deltas if not delta.empty)

    def closing(self, usage: Usage) -> bytes:
        """The whole response."""
        status = self._status(self._answer)
        return self._event(f"response.{status}", response=self._response(status, [self._item(self._answer)], usage))

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        """What there was of it, and the error."""
        opening = b"" if self._events else self._opening()
        refused = error.outcome in ("throttled", "shed")
        why = {"code": "rate_limit_exceeded" if refused else "server_error", "message": error.message}
        output = [self._item(self._answer, "incomplete")] if self._answer.text else []
        failed = self._event("response.failed", response=self._response("failed", output, usage, why))
        told = error.body()["error"]
        flat = {"code": error.code, "message": error.message, "param": error.param}
        return opening + failed + self._event("error", **flat, error=told)

    def _told(self, delta: ChoiceDelta) -> bytes:
        out = [] if self._events else [self._opening(), self._beginning()]
        self._answer.add(delta)
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        if delta.text or delta.scored:
            scores = _scores(delta.scored)
            out.append(self._event("response.output_text.delta", **place, delta=delta.text, logprobs=scores))
        if delta.finish in ("stop", "length"):
            part, item = self._part(self._answer), self._item(self._answer)
            out += [
                self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
            ]
        return b"".join(out)

    def _opening(self) -> bytes:
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _beginning(self) -> bytes:
        item = {**self._item(Answer(0), "in_progress"), "content": []}
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added", **place, part=self._part(Answer(0))
        )

    def _event(self, kind: str, **content: Any) -> bytes:
        number = self._events
        self._events += 1
        return sse.named_event(kind, {"type": kind, "sequence_number": number, **content})


def _format_body(shape: JsonFormat | None) -> Json:
    """The answer's shape as this API words it."""
    if shape is None:
        return {"type": "text"}
    asked = dict(shape.asked)
    return {**asked.pop("json_schema", {}), **asked}


def usage_body(usage: Usage) -> Json:
    """The ``usage`` object of a response: the same figures as a chat's, under other names."""
    prompt = usage.prompt + usage.cached
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + usage.output,
    }


def _scores(scored: Sequence[ScoredToken]) -> list[Json]:
    return [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in scored]


def _entry(token: Alternative) -> Json:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.data)}
