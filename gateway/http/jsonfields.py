"""Reading a JSON object field by field, so that a mistake names its field, what was found and what is expected.

Rules
- One pass splits the object into raw values, a typed decoder per field reads those that are wanted; others are never
  decoded. NaN, Infinity, 1e400, lone surrogates and broken UTF-8 never get through: the decoder refuses them.
- What a body holds is counted before it is decoded: decoding takes the interpreter lock for as long as it lasts, and
  300,000 keys would keep the event loop waiting for 80 ms, from whatever thread.
- Messages never repeat text of the request beyond a short, quoted scrap of the value at fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from gateway.errors import ApiError, bad_request

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects in a body."""
MAX_STRINGS = MAX_CONTAINERS = 2**16
"""Most strings (keys are some), and most arrays and objects, in a body: a conversation of 4,096 messages has fewer."""
MAX_VALUES = 2**20
"""Most values, numbers above all: token ids."""

T = TypeVar("T")
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything = msgspec.json.Decoder(Any)
_STRINGS = re.compile(rb'"[^"]*"')
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_NEITHER_MARKS_NOR_COMMAS = bytes(set(_NO_MARKS) - set(b","))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def split(raw: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, undecoded. Raises ApiError 400 for anything else, and past the limits above."""
    if (complaint := crowded(raw)) is not None:
        raise bad_request(f"The body holds {complaint}. Send less at a time.", code="too_many_values")
    try:
        fields = _object.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError as error:
        raise bad_request(f"The body must be a JSON object: {_plain(error)}.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = " (a lone surrogate, half a character, is not text)" if b"\\ud" in raw.lower() else ""
        raise bad_request(f"The body is not valid JSON: {_plain(error)}{hint}.", code="invalid_json") from None
    if depth_exceeds(raw, MAX_DEPTH):
        raise _too_deep()
    return fields


def crowded(raw: bytes) -> str | None:
    """What JSON has too much of to be decoded at once; None: nothing. Text is as long as it likes."""
    if len(raw) <= 2 * min(MAX_STRINGS, MAX_CONTAINERS):  # a string or array has two bytes at least
        return None
    quotes, brackets, commas = raw.count(b'"'), raw.count(b"[") + raw.count(b"{"), raw.count(b",")
    if quotes > 2 * MAX_STRINGS:  # most may be escaped ones, within text
        quotes = _unescaped(raw).count(b'"')
        if quotes > 2 * MAX_STRINGS:
            return f"more than {MAX_STRINGS} strings"
    if brackets > MAX_CONTAINERS or commas >= MAX_VALUES:
        marks = _STRINGS.sub(b"", _unescaped(raw).translate(None, _NEITHER_MARKS_NOR_COMMAS))
        if marks.count(b"[") + marks.count(b"{") > MAX_CONTAINERS:
            return f"more than {MAX_CONTAINERS} arrays and objects"
        if marks.count(b",") >= MAX_VALUES:
            return f"more than {MAX_VALUES} values"
    return None


def _unescaped(raw: bytes) -> bytes:
    """Without escaped quotes: the others begin and end strings."""
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"")


def depth_exceeds(raw: bytes, limit: int) -> bool:
    """Whether well-formed JSON nests deeper than ``limit``. Every pass below takes the innermost level away."""
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return False
    # Few passes over all bytes, each in C and short: a regular expression would hold up the event loop from a thread.
    marks = (
        _unescaped(raw).translate(_ONE_KIND, _NO_MARKS).replace(b'""', b"")
    )  # what is left of a string holds brackets
    brackets = _STRINGS.sub(b"", marks)
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


Check = Callable[[Any], str | None]
"""Returns the complaint about a value of the right type, or None. Its ``schema``, if any, says so in JSON schema."""


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """How to read one field, and what the OpenAPI document says of it."""

    decoder: msgspec.json.Decoder[T]
    check: Check = lambda _: None
    doc: str = ""

    def schema(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """JSON schema of the field, null included, and of the objects that it refers to by ``#/components/schemas``."""
        (schema,), components = msgspec.json.schema_components([self.decoder.type], ref_template=REFERENCE)
        schema = {**schema, **getattr(self.check, "schema", {})}
        kinds = schema.get("type")
        if isinstance(kinds, str) and "enum" not in schema:
            schema["type"] = [kinds, "null"]
        elif kinds != "null":
            schema = {"anyOf": [*(schema.pop("anyOf", None) or [schema]), {"type": "null"}]}
        return ({**schema, "description": self.doc} if self.doc else schema), components


REFERENCE = "#/components/schemas/{name}"


def field(type_: Any, check: Check = lambda _: None, doc: str = "") -> Field[Any]:
    """A field of ``type_``; null means "not given" and is handled by the reader."""
    return Field(msgspec.json.Decoder(type_), check, doc)


@dataclass(frozen=True, slots=True)
class between:  # noqa: N801 - reads as the check it makes
    """Check of a number; ``hint`` ends the complaint."""

    low: float
    high: float
    hint: str = ""

    def __call__(self, value: Any) -> str | None:
        if self.low <= value <= self.high:
            return None
        shown = str(value)
        shown = shown if len(shown) <= 32 else f"one of {len(shown)} digits"
        return f"must be between {self.low} and {self.high}{f' ({self.hint})' if self.hint else ''}, got {shown}"

    @property
    def schema(self) -> dict[str, Any]:
        """The bounds."""
        return {"minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class checked:  # noqa: N801
    """A check written as a function, with what it means in JSON schema."""

    complain: Callable[[Any], str | None]
    schema: dict[str, Any]

    def __call__(self, value: Any) -> str | None:
        return self.complain(value)


def read(fields: Mapping[str, msgspec.Raw], name: str, how: Field[T], default: T) -> T:
    """One field's value, ``default`` when it is absent or null. Raises ApiError 400 with ``param``."""
    raw = fields.get(name)
    if raw is None or (len(raw) == 4 and bytes(raw) == b"null"):
        return default
    try:
        value = how.decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise type_error(name, error) from None
    except RecursionError:
        raise _too_deep() from None
    complaint = how.check(value)
    if complaint:
        raise bad_request(f"{name} {complaint}.", param=name)
    return value


def read_any(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    """One field's value without a type; a number that no float can hold is an error like everywhere."""
    try:
        return _anything.decode(fields[name])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise type_error(name, error) from None


def type_error(name: str, error: Exception) -> ApiError:
    """400 whose ``param`` is the path inside the field: ``messages[0].content``."""
    what, _, path = str(error).partition(" - at `$")
    return bad_request(f"{name}{path.rstrip('`')}: {what.replace('`', '')}.", param=f"{name}{path.rstrip('`')}")


def scrap(value: str, length: int = 32) -> str:
    """A short quoted piece of ``value`` for a message."""
    return repr(value if len(value) <= length else value[:length] + "…")


def _plain(error: Exception) -> str:
    return str(error).replace("`", "").removeprefix("JSON is malformed: ")


def _too_deep() -> ApiError:
    return bad_request(f"The body nests deeper than {MAX_DEPTH} levels. Flatten it.", code="invalid_json")
