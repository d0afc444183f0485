"""What the public API answers, as JSON schemas: data for ``openapi.py``. Tests hold real answers against them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def _object(optional: Json | None = None, /, **required: Any) -> Json:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _constant(value: str) -> Json:
    return {"type": "string", "const": value}


def _list(items: Any) -> Json:
    return {"type": "array", "items": items}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_TIME: Json = {"type": "integer", "description": "Unix time."}
_ANYTHING: Json = {}
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_TOKEN = _object(token=_TEXT, logprob=_NUMBER, bytes=_nullable(_list(_COUNT)))
_CHAT_LOGPROBS = _nullable(
    _object(content=_nullable(_list(_object(top_logprobs=_list(_TOKEN), **_TOKEN["properties"]))))
)
_MESSAGE = _object(
    {"tool_calls": _list(_ANYTHING)}, role=_constant("assistant"), content=_nullable(_TEXT), refusal={"type": "null"}
)
_FINISH = _one_of("stop", "length", "tool_calls", "content_filter")
_MESSAGE_ITEM = _object(
    id=_TEXT,
    type=_constant("message"),
    role=_constant("assistant"),
    status=_one_of("completed", "incomplete"),
    content=_list(
        _object(
            type=_constant("output_text"),
            text=_TEXT,
            annotations=_list(_ANYTHING),
            logprobs=_list(_object(top_logprobs=_list(_TOKEN), **_TOKEN["properties"])),
        )
    ),
)
_CALL_ITEM = _object(
    id=_TEXT,
    type=_constant("function_call"),
    call_id=_TEXT,
    name=_TEXT,
    arguments=_TEXT,
    status=_one_of("completed", "incomplete"),
)


def _completion(kind: str, choice: Json) -> Json:
    return _object(
        id=_TEXT,
        object=_constant(kind),
        created=_TIME,
        model=_TEXT,
        system_fingerprint=_TEXT,
        choices=_list(choice),
        usage=_USAGE,
    )


ANSWERS: Json = {
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_nullable(_TEXT), code=_nullable(_TEXT)),
    ),
    "ChatCompletion": _completion(
        "chat.completion", _object(index=_COUNT, message=_MESSAGE, logprobs=_CHAT_LOGPROBS, finish_reason=_FINISH)
    ),
    "Completion": _completion(
        "text_completion",
        _object(
            index=_COUNT,
            text=_TEXT,
            logprobs=_nullable(
                _object(
                    tokens=_list(_TEXT),
                    token_logprobs=_list(_nullable(_NUMBER)),
                    top_logprobs=_nullable(_list(_nullable({"type": "object", "additionalProperties": _NUMBER}))),
                    text_offset=_list(_COUNT),
                )
            ),
            finish_reason=_FINISH,
        ),
    ),
    "Response": _object(
        id=_TEXT,
        object=_constant("response"),
        created_at=_TIME,
        status=_one_of("completed", "incomplete"),
        error={"type": "null"},
        incomplete_details=_nullable(_object(reason=_one_of("max_output_tokens", "content_filter"))),
        model=_TEXT,
        output=_list({"anyOf": [_MESSAGE_ITEM, _CALL_ITEM]}),
        usage=_object(
            input_tokens=_COUNT,
            input_tokens_details=_object(cached_tokens=_COUNT),
            output_tokens=_COUNT,
            output_tokens_details=_object(reasoning_tokens=_COUNT),
            total_tokens=_COUNT,
        ),
    ),
    "EmbeddingList": _object(
        object=_constant("list"),
        model=_TEXT,
        data=_list(_object(object=_constant("embedding"), index=_COUNT, embedding={"anyOf": [_list(_NUMBER), _TEXT]})),
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_nullable(_list(_TEXT))),
    "Text": _object(prompt=_TEXT),
    "Model": _object(
        id=_TEXT,
        object=_constant("model"),
        created=_TIME,
        owned_by=_TEXT,
        max_model_len={"type": "integer", "minimum": 1},
    ),
    "Usage": _object(
        object=_constant("usage"),
        tenant=_TEXT,
        user=_nullable(_TEXT),
        currency=_nullable(_TEXT),
        month=_nullable({"type": "object", "description": "Sums of what was settled; null without a ledger."}),
        limits=_list(
            _object(
                level=_one_of("organisation", "tenant", "user", "key"),
                limit=_TEXT,
                maximum={"anyOf": [_COUNT, _TEXT]},
                remaining={"anyOf": [{"type": "integer"}, _TEXT]},
                reset_seconds=_nullable(_NUMBER),
            )
        ),
    ),
    "ModelList": _object(object=_constant("list"), data=_list({"$ref": "#/components/schemas/Model"})),
    "Status": _object(status=_one_of("ok", "ready", "starting", "draining")),
    "Document": _object(openapi=_TEXT, info={"type": "object"}, paths={"type": "object"}),
}
"""Schemas by name. Whole answers only: of a stream OpenAPI 3.1 can say that it has events, not which."""

EVENT: Json = _object({"event": _TEXT}, data=_TEXT)
"""One event of a stream; its data is a chunk as JSON, or ``[DONE]``."""

ERRORS: dict[int, str] = {
    400: "The request is wrong, or could never pass the caller's limits.",
    401: "No credential, or not a valid one.",
    403: "Verified, but not allowed.",
    404: "Unknown model, or one the caller has no access to.",
    408: "The body did not arrive in time.",
    409: "The answer under this Idempotency-Key is not kept.",
    413: "The body is too large.",
    415: "The body is compressed.",
    422: "The Idempotency-Key was used with another body.",
    429: "Over quota, or the queue is full; Retry-After says when to come back.",
    431: "The headers are too large.",
    500: "A fault here or in a worker.",
    503: "No worker, draining, or a dependency is down; Retry-After says when to come back.",
    504: "It took longer than the time limits allow.",
}
"""Statuses of failures; all have the same body."""

_RATE = {"required": False, "schema": {"type": "string"}}
HEADERS: Json = {
    "x-request-id": {
        "required": True,
        "schema": {"type": "string"},
        "description": "The caller's own, or one made here.",
    },
    **{f"x-ratelimit-{what}-{of}": _RATE for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")},
}
"""Headers of every answer."""
