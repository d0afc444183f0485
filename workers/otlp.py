"""Spans as the bytes of an OTLP ``ExportTraceServiceRequest``, straight from ``SpanData``. Imports no OpenTelemetry.

The SDK makes a span object of each, then a protobuf object, then bytes: about 60 µs a span, which the process's other
threads wait for. Writing the bytes here takes a sixth of it. The format is opentelemetry-proto 1.x (``trace.proto``,
``common.proto``), which is stable; a test reads what is written here with the published classes.

Rules
- Pure but for a memory of attribute names; one thread uses one ``Encoder``.
- What has its default (an empty list, no parent) is left out, as proto3 has it.
- A value of another type than ``spans.Value`` raises TypeError: its trace is lost, no other. Text that is no Unicode
  (a lone surrogate) and numbers beyond 64 bits are told as well as they can be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from workers.spans import Attributes, Kind, Link, SpanContext, SpanData

SCOPE = "forebay"
_KINDS: Mapping[Kind, bytes] = {"internal": b"\x30\x01", "server": b"\x30\x02", "client": b"\x30\x03"}
_KNOWS_REMOTE, _IS_REMOTE = 0x100, 0x200
"""Span flags: whether it is known, and whether, the parent is in another process."""
_IDS = struct.Struct(">HQQHQ")
_PARENT = struct.Struct(">HQ")
_TIMES = struct.Struct("<BQBQ")
_TIME = struct.Struct("<BQ")
_FLAGS = struct.Struct("<HI")
_DOUBLE = struct.Struct("<Bd")
_LOW = (1 << 64) - 1
_MAX_KEYS = 1024


def _varint(number: int) -> bytes:
    """Base 128, least significant first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_SIZES = tuple(map(_varint, range(1024)))


def _sized(data: bytes) -> bytes:
    """A length-delimited field's value."""
    size = len(data)
    return (_SIZES[size] if size < 1024 else _varint(size)) + data


def _text(value: str) -> bytes:
    return _sized(value.encode("utf-8", "replace"))


class Encoder:
    """Encodes for one resource."""

    def __init__(self, resource: Attributes, *, schema_url: str = "", longest: int | None = None) -> None:
        """``resource``: who exports. ``longest``: characters of a text value, the rest is cut off; None: all."""
        self._longest = longest
        self._keys: dict[str, bytes] = {}
        self._resource = b"\x0a" + _sized(b"".join(self._attributes(b"\x0a", resource)))
        self._schema = b"\x1a" + _text(schema_url) if schema_url else b""
        self._scope = b"\x0a" + _sized(b"\x0a" + _text(SCOPE))

    def request(self, spans: Iterable[bytes]) -> bytes:
        """An ``ExportTraceServiceRequest`` of what ``span`` made."""
        scoped = b"\x12" + _sized(b"".join((self._scope, *spans)))
        return b"\x0a" + _sized(self._resource + scoped + self._schema)

    def span(self, data: SpanData) -> bytes:
        """One span, for ``request``. Raises TypeError for an attribute of a type that none has."""
        context, parent = data.context, data.parent
        trace_id = context.trace_id
        parts = [_IDS.pack(0x0A10, trace_id >> 64, trace_id & _LOW, 0x1208, context.span_id)]
        if context.tracestate:
            parts.append(b"\x1a" + _text(context.tracestate))
        flags = _KNOWS_REMOTE
        if parent is not None:
            parts.append(_PARENT.pack(0x2208, parent.span_id))
            if parent.remote:
                flags |= _IS_REMOTE
        parts.append(b"\x2a" + _text(data.name) + _KINDS[data.kind])
        parts.append(_TIMES.pack(0x39, data.start_ns, 0x41, data.end_ns))
        parts += self._attributes(b"\x4a", data.attributes)
        for name, at, attributes in data.events:
            told = _TIME.pack(0x09, at) + b"\x12" + _text(name)
            parts.append(b"\x5a" + _sized(b"".join((told, *self._attributes(b"\x1a", attributes)))))
        parts += map(self._link, data.links)
        parts.append(b"\x7a\x02\x18\x02" if data.error else b"\x7a\x00")
        parts.append(_FLAGS.pack(0x0185, flags))
        return b"\x12" + _sized(b"".join(parts))

    def _link(self, link: Link) -> bytes:
        context: SpanContext = link.context
        trace_id = context.trace_id
        parts = [_IDS.pack(0x0A10, trace_id >> 64, trace_id & _LOW, 0x1208, context.span_id)]
        if context.tracestate:
            parts.append(b"\x1a" + _text(context.tracestate))
        parts += self._attributes(b"\x22", link.attributes)
        parts.append(struct.pack("<BI", 0x35, _KNOWS_REMOTE | (_IS_REMOTE if context.remote else 0)))
        return b"\x6a" + _sized(b"".join(parts))

    def _attributes(self, tag: bytes, attributes: Attributes) -> list[bytes]:
        """A ``KeyValue`` each, as a field with ``tag``."""
        keys, out = self._keys, []
        for key, value in attributes.items():
            if value is not None:
                head = keys.get(key) or self._key(key)
                out.append(tag + _sized(head + _sized(self._value(key, value))))
        return out

    def _key(self, key: str) -> bytes:
        """A ``KeyValue`` up to its value's size. Names are few; should they not be, they are forgotten again."""
        if len(self._keys) >= _MAX_KEYS:
            self._keys.clear()
        head = self._keys[key] = b"\x0a" + _text(key) + b"\x12"
        return head

    def _value(self, key: str, value: object) -> bytes:
        """An ``AnyValue``."""
        if isinstance(value, str):
            return b"\x0a" + _text(value if self._longest is None else value[: self._longest])
        if isinstance(value, bool):
            return b"\x10\x01" if value else b"\x10\x00"
        if isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 63:
                return b"\x0a" + _text(str(value))
            return b"\x18" + (_SIZES[value] if 0 <= value < 1024 else _varint(value & _LOW))
        if isinstance(value, float):
            return _DOUBLE.pack(0x21, value)
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return b"\x2a" + _sized(b"".join(b"\x0a" + _sized(self._value(key, one)) for one in value))
        raise TypeError(f"{key}: a value of type {type(value).__name__} is no attribute's")
