"""gRPC between one gateway and one worker: a single bidirectional stream, MessagePack frames, no protobuf, no pickle.

Method ``/forebay.Worker/Session``. The gateway opens it and sends ``Down`` messages; the worker answers ``Hello`` (once
its model is loaded; the stream waits for that), then ``StepOutputs`` and ``Purged``.

Rules
- The port takes only its gateway: a UNIX socket in a directory that only its owner can enter, or a shared secret in the
  call's metadata, compared in constant time (UNAUTHENTICATED otherwise). TCP always takes a secret. Without TLS
  (``tls.py``) it is not encrypted on the way; with it both ends also show a certificate.
- A prefill worker's port also answers ``/forebay.Worker/Blocks`` (``workers.transfer``): no secret, but a ticket that
  only its gateway gives out, good for one prompt's blocks, once.
- One session at a time. A new one with the secret *replaces* the old, so that a restarted gateway is not locked out by
  a half-dead connection. The old one ends with ABORTED.
- When a session ends, however it ends, every request of it is cancelled; the next session starts only when the
  engine has let go of all of them.
- What waits for the worker shares a frame; the last word on a trace waits for the next request's. A frame is at most
  ``MAX_FRAME`` bytes in both directions (a million prompt tokens take 5 MB). ``send`` refuses a larger one; a peer that
  sends one loses its stream (RESOURCE_EXHAUSTED).
- Keepalive: a peer whose host or process is frozen is noticed within ``KEEPALIVE_S`` + ``KEEPALIVE_TIMEOUT_S`` seconds.
- No import of torch, none of the engine.
"""

from workers.rpc.client import WorkerClient
from workers.rpc.server import WorkerServer
from workers.rpc.tls import TlsFiles, TlsFilesError
from workers.rpc.wire import MAX_FRAME, METHOD, SECRET_KEY, LinkError, SessionError

__all__ = [
    "MAX_FRAME",
    "METHOD",
    "SECRET_KEY",
    "LinkError",
    "SessionError",
    "TlsFiles",
    "TlsFilesError",
    "WorkerClient",
    "WorkerServer",
]
