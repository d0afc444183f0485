"""What rank 0 tells the other ranks, and what they answer while they start. msgspec over a socket pair, no pickle.

Rules
- One message is a frame: its length in 4 bytes, then MessagePack.
- A rank does what it is told in the order in which it was told; after ``Ready`` it says nothing any more.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec
import numpy as np

from workers.model.batch import Layout


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Which part of which model. The first message."""

    rank: int
    directory: str
    engine: dict[str, Any]
    target: str
    """``module:attribute`` of the decoder."""
    store: str
    device: str
    dtype: str
    max_context: int
    threads: int
    fitted: str
    """The file of a fitted rounding, if there is one."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Load, with so many blocks of keys and values."""

    blocks: int


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Compute a step: a ``Layout`` without its samplers. Bytes are int64 arrays."""

    tokens: bytes
    positions: bytes
    slots: bytes
    query_lens: list[int]
    starts: list[int]
    context_lens: list[int]
    blocks: list[list[int]]
    logit_rows: list[int]

    @staticmethod
    def of(layout: Layout) -> Forward:
        """The message for a layout."""
        return Forward(
            layout.tokens.tobytes(),
            layout.positions.tobytes(),
            layout.slots.tobytes(),
            layout.query_lens,
            layout.starts,
            layout.context_lens,
            layout.blocks,
            layout.logit_rows,
        )

    def layout(self, block_size: int) -> Layout:
        """The layout again."""
        tokens, positions, slots = (
            np.frombuffer(part, dtype=np.int64).copy() for part in (self.tokens, self.positions, self.slots)
        )
        return Layout(
            tokens=tokens,
            positions=positions,
            slots=slots,
            query_lens=self.query_lens,
            starts=self.starts,
            context_lens=self.context_lens,
            blocks=self.blocks,
            block_size=block_size,
            logit_rows=self.logit_rows,
        )


class Zero(msgspec.Struct, frozen=True, tag="zero"):
    """``KvCache.zero``."""

    blocks: list[int]


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """``KvCache.copy``."""

    pairs: list[tuple[int, int]]


class Save(msgspec.Struct, frozen=True, tag="save"):
    """``KvCache.save``; the bytes go to rank 0 through the group."""

    blocks: list[int]


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """``KvCache.restore``; the bytes come from rank 0 through the group."""

    blocks: list[int]


class Room(msgspec.Struct, frozen=True, tag="room"):
    """How a rank would divide its device's memory: the fields of ``Budget``."""

    budget: dict[str, int]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The part is loaded."""

    weight_bytes: int
    block_bytes: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot be; the text is for the operator."""

    error: str


Down = Setup | Begin | Forward | Zero | Copy | Save | Restore
Up = Room | Ready | Failed

_encoder = msgspec.msgpack.Encoder()
_down = msgspec.msgpack.Decoder(Down)
_up = msgspec.msgpack.Decoder(Up)


def encode(message: Down | Up) -> bytes:
    """A frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


class Channel:
    """One end of a socket pair. One thread sends, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, frame: bytes, timeout_s: float | None = None) -> None:
        """Send what ``encode`` made. Raises OSError (TimeoutError too): the other side is gone or does not read."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(frame)

    def down(self) -> Down | None:
        """The next message for a rank; None when rank 0 is gone."""
        body = self._frame()
        return None if body is None else _down.decode(body)

    def up(self) -> Up | None:
        """The next message for rank 0; None when the rank is gone."""
        body = self._frame()
        return None if body is None else _up.decode(body)

    def close(self) -> None:
        """Close; the other side reads the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _frame(self) -> bytes | None:
        head = self._exactly(4)
        return None if head is None else self._exactly(int.from_bytes(head, "big"))

    def _exactly(self, count: int) -> bytes | None:
        self._socket.settimeout(None)
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(count - len(data))
            except OSError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)
