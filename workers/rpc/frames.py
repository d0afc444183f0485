"""The format of the local transport: frames of a kind and a length, over a byte stream that keeps order.

``kind`` (one byte), ``length`` (four bytes, big-endian), then so many bytes: for ``MESSAGE`` what gRPC would carry.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

import msgspec

from workers.rpc.wire import MAX_FRAME, SessionError

VERSION = 1
"""Of frames and of the opening; ``protocol.PROTOCOL`` counts what messages mean."""
_HEAD = Struct(">BI")


class Kind(IntEnum):
    """What a frame holds. Not numbers that a text or another protocol would begin with."""

    OPEN = 0xF0
    """The gateway's first: ``Opening``."""
    OPENED = 0xF1
    """The worker's first, empty: the gateway is let in."""
    MESSAGE = 0xF2
    PING = 0xF3
    PONG = 0xF4
    END = 0xF5
    """The worker's last: ``Ending``."""


_KINDS = {int(kind): kind for kind in Kind}


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who wants in."""

    version: int
    secret: str = ""


class Ending(msgspec.Struct, frozen=True):
    """Why the worker ends the session, as ``SessionError`` has it; ``ok`` for good order."""

    code: str
    detail: str


_encoder = msgspec.msgpack.Encoder()
_opening = msgspec.msgpack.Decoder(Opening)
_ending = msgspec.msgpack.Decoder(Ending)


def frame(kind: Kind, data: bytes = b"") -> bytes:
    """One frame."""
    return _HEAD.pack(kind, len(data)) + data


def opening(secret: str | None) -> bytes:
    """The gateway's first frame."""
    return frame(Kind.OPEN, _encoder.encode(Opening(VERSION, secret or "")))


def ending(code: str, detail: str) -> bytes:
    """The worker's last frame."""
    return frame(Kind.END, _encoder.encode(Ending(code, detail)))


def read_opening(data: bytes) -> Opening:
    """Raises msgspec.DecodeError."""
    return _opening.decode(data)


def read_ending(data: bytes) -> Ending:
    """Raises msgspec.DecodeError."""
    return _ending.decode(data)


class FrameReader:
    """Bytes as they come → frames. Holds at most one frame and what came with its end."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        """Longer frames are refused as soon as their length is known."""
        self._held = bytearray()
        self._at = 0

    def __len__(self) -> int:
        """Bytes that are held."""
        return len(self._held) - self._at

    def feed(self, data: bytes) -> None:
        """What came next."""
        self._held += data

    def take(self) -> tuple[Kind, bytes] | None:
        """The next frame that is complete. Raises SessionError for what is none, or is too long."""
        held, at = self._held, self._at
        if len(held) - at >= _HEAD.size:
            number, size = _HEAD.unpack_from(held, at)
            kind = _KINDS.get(number)
            if kind is None:
                raise SessionError("protocol", "not a frame of this protocol: do both ends run the same release?")
            if size > self.limit:
                raise SessionError("resource_exhausted", f"a frame of {size} bytes, at most {self.limit} are taken")
            begin, end = at + _HEAD.size, at + _HEAD.size + size
            if len(held) >= end:
                data = bytes(memoryview(held)[begin:end])
                self._at = end
                if end == len(held):
                    held.clear()
                    self._at = 0
                return kind, data
        if at:
            del held[:at]
            self._at = 0
        return None
