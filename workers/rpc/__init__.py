"""One session between one gateway and one worker: messages both ways as MessagePack, no protobuf, no pickle.

Two transports carry it (``schemes.py``), and whoever sends and listens sees no difference. Workers on this machine
(``unix:/path``): frames over the socket, without a thread or a task per message (``connection.py``). Workers elsewhere
(``host:port``): gRPC, one bidirectional stream ``/forebay.Worker/Session``, with TLS (``tls.py``).

The gateway opens it and sends ``Down`` messages; the worker answers ``Hello`` (once its model is loaded; the session
waits for that), then ``StepOutputs`` and ``Purged``.

Rules
- The port takes only its gateway: a UNIX socket in a directory that only its owner can enter, or a shared secret,
  compared in constant time (``unauthenticated`` otherwise). TCP always takes a secret. Without TLS it is not encrypted
  on the way; with it both ends also show a certificate.
- A prefill worker also answers ``/forebay.Worker/Blocks`` (``workers.transfer``), over gRPC in any case: no secret, but
  a ticket that only its gateway gives out, good for one prompt's blocks, once.
- One session at a time. A new one with the secret *replaces* the old, so that a restarted gateway is not locked out by
  a half-dead connection. The old one ends with ``aborted``.
- When a session ends, however it ends, every request of it is cancelled; the next session starts only when the
  engine has let go of all of them.
- What waits for the worker shares a frame; the last word on a trace waits for the next request's. A frame is at most
  ``MAX_FRAME`` bytes in both directions (a million prompt tokens take 5 MB). ``send`` refuses a larger one; a peer that
  sends one loses its session (``resource_exhausted``).
- While the gateway does not listen, the worker's news wait in the worker and are merged (``outbox.py``).
- Keepalive: a peer whose host or process is frozen is noticed within ``KEEPALIVE_S`` + ``KEEPALIVE_TIMEOUT_S`` seconds;
  a local worker from its greeting on, since loading a model may hold its interpreter for longer.
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
