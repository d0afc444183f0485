"""``response_format``: the shape that an answer must have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.errors import bad_request
from gateway.grammars import ANY_OBJECT, Schema
from gateway.http.jsonfields import field as spec
from gateway.http.jsonfields import read, scrap

MAX_SCHEMA_BYTES = 64 * 1024
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HELP = 'send {"type": "json_schema", "json_schema": {"name": "answer", "schema": {…}}}'


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The answer is JSON that matches ``schema``; ``param`` names the field that said so."""

    schema: Schema
    param: str
    asked: Mapping[str, Any]
    """As the API words it, for an upstream."""


class NamedSchema(msgspec.Struct):
    """A schema as a request gives it."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: NamedSchema | None = None


RESPONSE_FORMAT = spec(_ResponseFormat)


def response_format(fields: Mapping[str, msgspec.Raw]) -> JsonFormat | None:
    """The field of that name; None for plain text. Raises ApiError 400 with ``param``."""
    raw = fields.get("response_format")
    if raw is not None and len(raw) == 2:  # {} has always meant nothing
        return None
    value = read(fields, "response_format", RESPONSE_FORMAT, None)
    if value is None or value.type == "text":
        return None
    if value.type == "json_object":
        return JsonFormat(ANY_OBJECT, "response_format", {"type": "json_object"})
    if value.type != "json_schema":
        raise bad_request(
            f"response_format.type must be text, json_object or json_schema, got {scrap(value.type)}.",
            param="response_format.type",
        )
    if value.json_schema is None:
        raise bad_request(f"response_format.json_schema is missing; {_HELP}.", param="response_format.json_schema")
    return json_format(value.json_schema, "response_format.json_schema")


def json_format(named: NamedSchema, param: str) -> JsonFormat:
    """A named schema, checked; without one any object will do. Raises ApiError 400 below ``param``.

    ``strict`` makes no difference here: a schema is always enforced.
    """
    if named.name is None or not NAME.fullmatch(named.name):
        found = "it is missing" if named.name is None else f"got {scrap(named.name)}"
        raise bad_request(f"{param}.name must be 1 to 64 letters, digits, '_' or '-'; {found}.", param=f"{param}.name")
    check_schema_size(named.schema, f"{param}.schema")
    given = {key: value for key, value in msgspec.structs.asdict(named).items() if value is not None}
    schema = ANY_OBJECT if named.schema is None else named.schema
    return JsonFormat(schema, f"{param}.schema", {"type": "json_schema", "json_schema": given})


def check_schema_size(schema: object, param: str) -> None:
    """Raises ApiError 400 for what is larger than MAX_SCHEMA_BYTES as compact JSON."""
    size = len(msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise bad_request(
            f"{param} is {size} bytes of JSON; at most {MAX_SCHEMA_BYTES} are compiled. Make it smaller.", param=param
        )
