"""What both ends of the stream agree on: limits, errors, gRPC's names and options. The rules are in ``workers.rpc``."""

from __future__ import annotations

import asyncio
from typing import Any

SERVICE = "forebay.Worker"
METHOD = f"/{SERVICE}/Session"
BLOCKS_METHOD = f"/{SERVICE}/Blocks"
"""Between workers (``workers.transfer``)."""
SECRET_KEY = "forebay-secret"  # noqa: S105 - the metadata key, not a secret
OPEN_KEY = "forebay-session"
"""In the answer's first metadata when the worker lets the caller in; a refusal has none."""
MAX_FRAME = 64 * 2**20
MAX_JOINED = 256 * 1024
"""Messages for a worker share a frame up to so many bytes."""
KEEPALIVE_S = 10
KEEPALIVE_TIMEOUT_S = 5
MAX_QUEUED = 1024
"""Requests that may wait in a client's outbound line; control messages have sixteen times that."""
PATIENCE_S = 0.05
"""How long what nobody waits for waits for company in a frame."""
LAST_WORDS_S = 0.25
"""How long the end of a session waits for what is unsent."""
ORPHAN_WAIT_S = 10.0
"""How long a new session waits for the requests of the last one to be let go."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.max_send_message_length", MAX_FRAME),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),  # else a ping may take a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
    ("grpc.http2.max_ping_strikes", 0),
]
CLIENT_OPTIONS = [
    *_COMMON,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class LinkError(Exception):
    """A message was not sent: the stream is gone, its line is full, or the message is too large."""


class SessionError(Exception):
    """The session ended or never began.

    ``code`` is gRPC's status name in lower case, whatever the transport: ``unauthenticated``, ``aborted`` (replaced by
    another gateway), ``unavailable`` (connection lost), ``resource_exhausted`` (frame too large) …; or ``protocol``.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def wrong_secret() -> SessionError:
    """What every stranger hears."""
    return SessionError("unauthenticated", "this worker takes only its gateway: wrong secret")


async def cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and wait; what they raised stays in them.

    They have ended when it returns or raises: a cancellation of the caller that comes meanwhile is passed on then.
    """
    for task in tasks:
        task.cancel()
    cancelled = False
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that nobody warns of it
    if cancelled:
        raise asyncio.CancelledError
