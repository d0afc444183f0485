"""What a transport is: both ends of one way to talk (``schemes.py`` has those there are).

All carry the same messages under the same rules (``workers.rpc``), and one suite of tests holds them to these. Why
there are two is in ``workers/DESIGN.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace as with_fields

from workers.protocol import StepOutputs, Up

if TYPE_CHECKING:
    from workers.rpc.reception import Reception
    from workers.rpc.tls import TlsFiles
    from workers.rpc.unsent import Unsent

PART = 128
"""Sequences whose news are handed on in one turn of the event loop: a step of thousands would stop all else."""


def in_parts(message: Up) -> Iterator[Up]:
    """The same news in reports of at most ``PART`` outputs, in order; a small one, or anything else, is itself."""
    if not isinstance(message, StepOutputs) or len(message.outputs) <= PART:
        yield message
        return
    for begin in range(0, len(message.outputs), PART):
        yield with_fields(message, outputs=message.outputs[begin : begin + PART])


class Line(Protocol):
    """The gateway's end of one session. Belongs to the event loop."""

    @property
    def up(self) -> bool:
        """The worker has let us in, and nothing broke since."""
        ...

    async def open(self) -> None:
        """Wait for a worker to listen, and to let us in. Raises SessionError."""
        ...

    async def listen(self, on_message: Callable[[Up], None]) -> None:
        """See ``WorkerClient.listen``."""
        ...

    def wake(self) -> None:
        """There is something to send, and more may follow in this turn of the loop."""
        ...

    def flush(self) -> None:
        """Send what waits for the loop's next turn now, where that can be done."""
        ...

    async def say_the_rest(self, timeout_s: float) -> None:
        """Return when nothing is unsent, or nobody reads it."""
        ...

    async def close(self) -> None:
        """End the session, in whatever state. Idempotent."""
        ...


class Desk(Protocol):
    """What a worker's session is to its transport."""

    @property
    def finishing(self) -> bool:
        """It ends when what is to be sent by now is sent."""
        ...

    def heard(self, data: bytes) -> None:
        """A frame came. On the event loop. Raises SessionError for what is not of this protocol."""
        ...

    def take(self) -> list[bytes]:
        """Frames to be sent now, oldest first. From any thread, one at a time."""
        ...


class Caller(Protocol):
    """A gateway that showed the secret, as the worker's transport has it. Belongs to the event loop."""

    async def let_in(self) -> None:
        """Tell it that it is let in."""
        ...

    async def greet(self, hello: bytes) -> None:
        """Send the first message."""
        ...

    async def talk(self, desk: Desk) -> None:
        """Both ways, until it hangs up or the desk is finished. Raises SessionError for one that breaks the rules."""
        ...

    def news(self) -> None:
        """The desk has something to send. From any thread, never blocks."""
        ...


class Port(Protocol):
    """Where a worker listens. Belongs to the event loop."""

    @property
    def blocks_address(self) -> str:
        """Where other workers are answered; empty: where gateways are, or nowhere."""
        ...

    async def start(self, address: str) -> str:
        """Listen; the real address. Raises OSError when it cannot."""
        ...

    async def stop(self) -> None:
        """Close it with every session."""
        ...


@dataclass(frozen=True, slots=True)
class Transport:
    """Both ends of one way to talk."""

    line: Callable[[str, str | None, TlsFiles | None, Unsent], Line]
    """(address, secret, certificates, what is to be sent)"""
    port: Callable[[Reception, TlsFiles | None, Any], Port]
    """(who is let in, certificates, gRPC's handler for other workers)"""
