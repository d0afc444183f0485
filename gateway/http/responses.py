"""``/v1/responses``, one turn at a time: its body, and answers in exactly the Responses API's shapes.

Rules
- Nothing is kept between turns: ``store: true``, ``previous_response_id``, ``conversation`` and ``background`` get 400.
- A turn is a chat: ``instructions`` are its first message, the messages of ``input`` follow. So queue, limits and cache
  treat it as one.
- Items and tools come in by ``response_input.py`` and go out by ``response_output.py``.
- Events of a stream are typed and numbered from 0, and the last one holds the whole response: ``response.completed``,
  or ``response.incomplete`` where the output ran into its limit. There is no ``[DONE]``.
- A stream that fails ends with ``response.failed`` and an ``error`` event, which the official client raises.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import msgspec

from gateway.choices import ChoiceDelta
from gateway.errors import ApiError, bad_request
from gateway.grammars import ANY_OBJECT
from gateway.http import common, response_input, sse, unsupported
from gateway.http.jsonfields import Field, between, checked, read, scrap, split
from gateway.http.jsonfields import field as spec
from gateway.http.openai import GOOD_ENDS, Answer, Format, Json
from gateway.http.response_output import Output
from gateway.http.schemas import ChatRequest, Message, refuse_endless
from gateway.http.structure import JsonFormat, NamedSchema, json_format
from gateway.http.unsupported import Unsupported
from policies.types import Usage

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
    "max_tool_calls": Unsupported("no tools run here; stop calling when you have seen enough of them"),
    "reasoning": Unsupported("reasoning effort cannot be set", ({}, {"effort": "none"})),
    "truncation": Unsupported("input is never cut silently; shorten it before sending", ("disabled",)),
    "context_management": Unsupported("input is never cut silently; shorten it before sending", ([],)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """Body of ``/v1/responses``."""

    content_param: ClassVar[str] = "input"
    instructions: str | None = None
    top_logprobs: int = 0


class _TextFormat(NamedSchema):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})] = "text"


class _Text(msgspec.Struct):
    format: _TextFormat | None = None
    verbosity: Annotated[str | None, msgspec.Meta(extra_json_schema={"enum": ["medium", None]})] = None


def _include(value: list[str]) -> str | None:
    wrong = next((name for name in value if name not in INCLUDABLE), None)
    return None if wrong is None else f"can hold {', '.join(INCLUDABLE)}, got {scrap(wrong)}"


_INSTRUCTIONS = spec(str, doc="A system message before the input.")
_TOP_LOGPROBS = spec(int, between(0, 20))
_INCLUDE = spec(list[str], checked(_include, {"items": {"type": "string", "enum": list(INCLUDABLE)}}))
_TEXT = spec(_Text)

FIELDS: Mapping[str, Field[Any]] = {
    "input": response_input.INPUT,
    **common.FIELDS,
    **response_input.TOOL_FIELDS,
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
    text: _Text = read(fields, "text", _TEXT, _Text())
    _check_verbosity(text.verbosity)
    shape = _shape(text.format or _TextFormat())
    if shape is not None:
        refuse_endless(shared["params"], "text.format")
    box = response_input.toolbox(fields)
    if box is not None and box.shown:
        refuse_endless(shared["params"], "tools")
    instructions: str | None = read(fields, "instructions", _INSTRUCTIONS, None)
    first = () if instructions is None else (Message("system", instructions),)
    return ResponsesRequest(
        messages=(*first, *response_input.messages(fields)),
        toolbox=box,
        instructions=instructions,
        max_tokens=read(fields, "max_output_tokens", common.COUNT, None),
        max_tokens_param="max_output_tokens",
        top_logprobs=top,
        response_format=shape,
        **shared,
    )


def _check_verbosity(asked: str | None) -> None:
    """It can be set as little as in a chat. Raises ApiError 400."""
    known = unsupported.CHAT["verbosity"]
    if not known.accepts(asked):
        raise bad_request(
            f"text.verbosity is not supported: {known.why}.", param="text.verbosity", code="unsupported_parameter"
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


class ResponsesFormat(Format):
    """``/v1/responses``. A message with one text part, and calls of functions."""

    prefix = "resp"
    object = "response"
    chunk_object = "response"

    def __init__(self, *, job_id: str, request: ResponsesRequest, created: int, **base: Any) -> None:
        super().__init__(job_id=job_id, request=request, created=created, **base)
        self.id = f"resp_{job_id}"
        self._request = request
        self._created = created
        self._events = 0
        self._output = Output(job_id, self._calls)

    # -- in one piece ---------------------------------------------------------------------------------------------

    def full(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """The response object. Raises ValueError for an answer that did not end well."""
        (answer,) = answers
        self._reason(answer)
        for _ in self._output.take(ChoiceDelta(0, answer.text, scored=tuple(answer.scored), finish=answer.finish)):
            pass
        return self._response(self._output.status, self._output.items(), usage)

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
            "incomplete_details": {"reason": self._output.why_incomplete} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_tokens,
            "metadata": dict(request.metadata),
            "model": self._base["model"],
            "output": output,
            **response_input.told(request.toolbox),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.params.temperature,
            "text": {"format": _format_body(request.response_format)},
            "top_logprobs": request.top_logprobs,
            "top_p": request.params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage_body(usage),
            "user": request.user,
        }

    # -- as a stream ----------------------------------------------------------------------------------------------

    def stream(self, deltas: Iterable[ChoiceDelta]) -> bytes:
        """The opening events with the first output, then what happens to the items of the output."""
        return b"".join(self._told(delta) for delta in deltas if not delta.empty)

    def closing(self, usage: Usage) -> bytes:
        """The whole response."""
        status = self._output.status
        return self._event(f"response.{status}", response=self._response(status, self._output.items(), usage))

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        """What there was of it, and the error."""
        opening = b"" if self._events else self._opening()
        refused = error.outcome in ("throttled", "shed")
        why = {"code": "rate_limit_exceeded" if refused else "server_error", "message": error.message}
        failed = self._event("response.failed", response=self._response("failed", self._output.items(), usage, why))
        told = error.body()["error"]
        flat = {"code": error.code, "message": error.message, "param": error.param}
        return opening + failed + self._event("error", **flat, error=told)

    def _told(self, delta: ChoiceDelta) -> bytes:
        opening = b"" if self._events else self._opening()
        finish = delta.finish if delta.finish in GOOD_ENDS else None
        news = self._output.take(replace(delta, finish=finish))
        return opening + b"".join(self._event(kind, **content) for kind, content in news)

    def _opening(self) -> bytes:
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

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
