"""What a server means that will not run a request: by its status, or by an error inside its stream before any output.

Rules
- Its words are looked at and go nowhere: they may quote the prompt, or say where the server is.
- Too long is told by code, type or, since most servers have neither, by how they word it: only then may the request go
  to a pool that holds more.
- An error inside a stream is taken at its word only before the first output: servers that give everything which goes
  wrong on the way the same code (400) are many.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

MAX_RETRY_AFTER_S = 3600.0
_TOO_LONG = re.compile(
    r"context[ _](length|size|window|limit)|maximum (model|sequence) length"  # vLLM, SGLang, llama.cpp, providers
    r"|max_new_tokens\W+must be <=|inputs\W+must have less than",  # TGI
    re.IGNORECASE,
)
_TOO_LONG_NAMES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_STATUS_OF: Mapping[str, int] = {
    "badrequesterror": 400,
    "invalid_request_error": 400,
    "validation": 400,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded": 503,
    "overloaded_error": 503,
    "service_unavailable": 503,
    "serviceunavailableerror": 503,
}
"""What errors inside a stream call themselves, where they bring no number."""
_FIELD = re.compile(r"[a-z_]{1,40}")


class Refused(Exception):  # noqa: N818 - an answer, not a fault of ours
    """The request ends with one of the protocol's error codes. The text is for the operator's log."""

    def __init__(self, code: str, why: str, retry_after_s: float | None = None, param: str = "") -> None:
        super().__init__(why)
        self.code = code
        self.retry_after_s = retry_after_s
        self.param = param
        """The field of the request that it is about, where the server named one that it was sent."""


def by_status(status: int, body: bytes, retry_after: str | None, sent: Collection[str]) -> Refused:
    """A status other than 200. ``sent``: the fields of the request."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = body.decode(errors="replace")
    return _refusal(status, said, retry_after_s(retry_after), sent, f"it answered {status}")


def in_band(said: Any, sent: Collection[str]) -> Refused:
    """An error inside the stream, before any output."""
    return _refusal(_status(said), said, None, sent, "it reported an error inside the stream")


def _refusal(status: int, said: Any, wait_s: float | None, sent: Collection[str], why: str) -> Refused:
    if status in (400, 413, 422, 500) and _too_long(said):
        return Refused("prompt_too_long", why)
    if status == 429:
        return Refused("throttled", why, wait_s)
    if status == 503:
        return Refused("unavailable", why, wait_s)
    if status in (408, 504):
        return Refused("upstream_timeout", why)
    if status in (400, 413, 422):
        return Refused("bad_request", why, param=_param(said, sent))
    return Refused("upstream_failed", why)


def _error(said: Any) -> Mapping[str, Any]:
    """The error object, whether it stands alone or inside ``error``, where some put a mere text."""
    if isinstance(said, Mapping):
        inner = said.get("error")
        if isinstance(inner, Mapping):
            return inner
        return {**said, "message": inner} if isinstance(inner, str) else said
    return {"message": said} if isinstance(said, str) else {}


def _too_long(said: Any) -> bool:
    error = _error(said)
    if any(error.get(name) in _TOO_LONG_NAMES for name in ("code", "type") if isinstance(error.get(name), str)):
        return True
    message = error.get("message")
    return isinstance(message, str) and _TOO_LONG.search(message[:4096]) is not None


def _param(said: Any, sent: Collection[str]) -> str:
    """The field that the server complains of, if it is one that it was sent: nothing else is its caller's business."""
    param = _error(said).get("param")
    match = _FIELD.match(param) if isinstance(param, str) else None
    return match[0] if match is not None and match[0] in sent else ""


def _status(said: Any) -> int:
    """The HTTP status that an error without one stands for; 500 where it does not say."""
    error = _error(said)
    for name in ("code", "status", "type", "error_type"):
        value = error.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            if value.isascii() and value.isdigit():
                return int(value[:3])
            if value.lower() in _STATUS_OF:
                return _STATUS_OF[value.lower()]
    return 500


def retry_after_s(value: str | None) -> float | None:
    """Seconds, from seconds or from a date (RFC 9110 §10.2.3); None for what is neither."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value[:9]), MAX_RETRY_AFTER_S)
    try:
        moment = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, moment - time.time()), MAX_RETRY_AFTER_S)
