"""What a field is called in the body that a caller sent, for errors that come of it later.

A turn of ``/v1/responses`` is run as a chat, and an upstream is sent names of its own: callers hear theirs.
"""

from __future__ import annotations

from gateway.http.schemas import ChatRequest, Request


def shape_param(request: Request) -> str:
    """The field that the grammar of the answer was made of."""
    if isinstance(request, ChatRequest) and request.toolbox is not None and request.toolbox.shown:
        return "tools"
    return _format_param(request)


def own_name(request: Request, asked: str) -> str:
    """The field that an upstream was sent as ``asked``."""
    if asked in ("messages", "prompt", "input"):
        return request.content_param
    if asked in ("max_tokens", "max_completion_tokens"):
        return request.max_tokens_param
    if asked == "n" and request.drawn is not None:
        return "best_of"
    return _format_param(request) if asked == "response_format" else asked


def _format_param(request: Request) -> str:
    return "response_format" if request.response_format is None else request.response_format.param
