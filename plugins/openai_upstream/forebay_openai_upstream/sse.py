"""Bytes of an event stream → the data of its events, as the WHATWG HTML standard (§9.2) reads them.

Bounded: an event of more than ``MAX_EVENT`` bytes raises ValueError, whatever the server sends.
"""

from __future__ import annotations

MAX_EVENT = 4 * 2**20


class EventReader:
    """Feed it bytes as they come; it gives back whole events."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._held = 0
        self._skip_newline = False
        self._begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ``chunk`` completes. Raises ValueError for one that is too long."""
        if self._skip_newline and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_newline = False
        self._skip_newline = chunk.endswith(b"\r")
        self._rest += chunk
        if b"\n" not in chunk and b"\r" not in chunk:
            self._check()
            return []
        *lines, rest = bytes(self._rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(rest)
        if not self._begun:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no part of the first name
            self._begun = True
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data, self._held = [], 0
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._held += len(value)
        self._check()
        return events

    def _check(self) -> None:
        if len(self._rest) + self._held > MAX_EVENT:
            raise ValueError(f"an event of more than {MAX_EVENT} bytes")
