"""Bytes of a server-sent event stream as the OpenAI API sends it: ``data:`` lines, with ``event:`` before them where
events are typed.

An error inside a stream is ``data: {"error": …}``: what OpenAI clients look for. ``DONE`` is sent after success only,
so that a stream that broke never looks complete.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
"""``x-accel-buffering`` tells nginx to pass every event on at once."""

_encode = msgspec.json.Encoder().encode


def event(obj: Any) -> bytes:
    """One event with ``obj`` as JSON. JSON never holds a raw line break, so one ``data:`` line is enough."""
    return b"data: " + _encode(obj) + b"\n\n"


def named_event(name: str, obj: Any) -> bytes:
    """One event with a type, as the Responses API sends them."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(obj) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The in-band form of an error after the first byte."""
    return event(error.body())
