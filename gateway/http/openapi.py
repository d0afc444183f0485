"""``/openapi.json``: the public API as an OpenAPI 3.1 document, made of the tables that the parsers read.

Rules
- Bodies come from the parsers' own field tables, so that they cannot drift; answers are written down in
  ``openapi_answers.py`` and held against real ones by the tests.
- It describes the software, nothing of this deployment: no model, no tenant, no limit. So it needs no credential.
- Fields that are known and refused (``unsupported.py``) are not in it; other unknown ones are ignored by the parsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.http import embeddings, responses, schemas, tokenize
from gateway.http.jsonfields import REFERENCE, Field
from gateway.http.openapi_answers import ANSWERS, ERRORS, EVENT, HEADERS

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Body:
    """An endpoint that takes a JSON body."""

    name: str
    """Of the body's schema."""
    summary: str
    fields: Mapping[str, Field[Any]]
    answer: str
    """The schema of a whole answer, in ``ANSWERS``."""
    required: tuple[str, ...] = ("model",)
    streams: bool = False


BODIES: Mapping[str, Body] = {
    "/v1/chat/completions": Body(
        "ChatRequest", "Answer a chat.", schemas.CHAT_FIELDS, "ChatCompletion", ("model", "messages"), streams=True
    ),
    "/v1/completions": Body(
        "CompletionRequest",
        "Continue a text.",
        schemas.COMPLETION_FIELDS,
        "Completion",
        ("model", "prompt"),
        streams=True,
    ),
    "/v1/responses": Body(
        "ResponsesRequest", "Answer one turn.", responses.FIELDS, "Response", ("model", "input"), streams=True
    ),
    "/v1/embeddings": Body("EmbeddingsRequest", "Embed texts.", embeddings.FIELDS, "EmbeddingList", ("model", "input")),
    "/tokenize": Body("TokenizeRequest", "Token ids of a text or a chat.", tokenize.TOKENIZE_FIELDS, "Tokens"),
    "/detokenize": Body(
        "DetokenizeRequest", "The text of token ids.", tokenize.DETOKENIZE_FIELDS, "Text", ("model", "tokens")
    ),
}
"""By route; everything that is POSTed."""

_GETS: Mapping[str, tuple[str, str, bool]] = {
    "/v1/models": ("The models that the caller may use.", "ModelList", True),
    "/v1/models/{model}": ("One of them.", "Model", True),
    "/v1/usage": ("What the caller used this month, and what is left of its limits.", "Usage", True),
    "/healthz": ("The process is up.", "Status", False),
    "/readyz": ("Every model can be used; 503 while not.", "Status", False),
    "/openapi.json": ("This document.", "Document", False),
}
"""By route: summary, schema of the answer, whether it asks for a credential."""


def document(version: str) -> bytes:
    """The document as JSON. ``version``: of the software."""
    components: Json = {}
    paths: Json = {route: {"post": _post(body, components)} for route, body in BODIES.items()}
    paths |= {route: {"get": _get(route, *about)} for route, about in _GETS.items()}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Forebay",
                "version": version,
                "description": "An OpenAI-compatible API in front of language-model workers.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "servers": [{"url": "/"}],
            "security": [{"token": []}],
            "paths": paths,
            "components": {
                "schemas": {**ANSWERS, **components},
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
                "headers": HEADERS,
                "responses": {str(status): _failure(text) for status, text in ERRORS.items()},
            },
        }
    )


def _post(body: Body, components: Json) -> Json:
    properties = {}
    for name, how in body.fields.items():
        schema, needed = how.schema()
        components.update(needed)
        properties[name] = schema
    for name in body.required:
        properties[name] = _not_null(properties[name])
    components[body.name] = {"type": "object", "properties": properties, "required": list(body.required)}
    content: Json = {"application/json": {"schema": _reference(body.answer)}}
    if body.streams:
        content["text/event-stream"] = {"schema": EVENT}
    return {
        "summary": body.summary,
        "operationId": body.name.removesuffix("Request"),
        "parameters": [_KEY] if body.streams else [],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _reference(body.name)}}},
        "responses": {"200": _success(content), **_failures(ERRORS)},
    }


def _get(route: str, summary: str, answer: str, secured: bool) -> Json:
    statuses = (401, 403, 404, 431, 503) if secured else (431, 503)
    operation: Json = {
        "summary": summary,
        "operationId": f"get{answer}",
        "responses": {
            "200": _success({"application/json": {"schema": _reference(answer)}}),
            **_failures(statuses),
        },
    }
    if not secured:
        operation["security"] = []
    if "{model}" in route:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route == "/readyz":
        operation["responses"]["503"] = operation["responses"]["200"] | {"description": "Not ready yet, or draining."}
    return operation


_KEY: Json = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Send the same request again under the same key, and it runs and is charged once.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}


def _success(content: Json) -> Json:
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS}
    return {"description": "Done.", "headers": headers, "content": content}


def _failure(text: str) -> Json:
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS}
    return {"description": text, "headers": headers, "content": {"application/json": {"schema": _reference("Error")}}}


def _failures(statuses: Any) -> Json:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _reference(name: str) -> Json:
    return {"$ref": REFERENCE.format(name=name)}


def _not_null(schema: Json) -> Json:
    """A required field's schema: null would be as good as nothing."""
    if isinstance(schema.get("type"), list):
        return {**schema, "type": schema["type"][0]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [each for each in schema["anyOf"] if each != {"type": "null"}]}
    return schema
