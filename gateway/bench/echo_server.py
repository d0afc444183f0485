"""``python -m gateway.bench.echo_server``: a bare Starlette application that answers at once. Prints its port.

It is what ``bench gateway`` holds the gateway against: the same HTTP server and the same bodies, and nothing done. One
token for a request that wants no stream, ``max_tokens`` events for one that does.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


class _Asked(msgspec.Struct):
    max_tokens: int = 1
    stream: bool = False


_decode = msgspec.json.Decoder(_Asked).decode
_EVENT = b'data: {"choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'
_WHOLE = b'{"choices":[{"index":0,"text":" token","finish_reason":"length"}],"usage":{"completion_tokens":1}}'


async def complete(request: Request) -> Response:
    """``POST /v1/completions``."""
    asked = _decode(await request.body())
    if not asked.stream:
        return Response(_WHOLE, media_type="application/json")

    async def events() -> AsyncIterator[bytes]:
        for _ in range(asked.max_tokens):
            yield _EVENT
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def main() -> None:
    """Serve until killed."""
    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
    bound = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{bound.getsockname()[1]}\n")
    sys.stdout.flush()
    await uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).serve([bound])


if __name__ == "__main__":
    uvloop.run(main())
