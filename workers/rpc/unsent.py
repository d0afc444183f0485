"""What a gateway still has to say to a worker, bounded."""

from __future__ import annotations

from collections import deque

from workers.protocol import Down, Generate, encode, joined
from workers.rpc.wire import MAX_FRAME, MAX_JOINED, LinkError

_ENVELOPE = len(joined([]))


class Unsent:
    """Messages in order, already encoded. Bounded for requests; what ends or steers them has room beyond that."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._queue: deque[bytes] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        """How many."""
        return len(self._queue)

    def add(self, message: Down) -> None:
        """Raises LinkError for one that is too large, or too many."""
        data = encode(message)
        if len(data) + _ENVELOPE > MAX_FRAME:
            raise LinkError(f"the message has {len(data)} bytes, a frame at most {MAX_FRAME}")
        request = isinstance(message, Generate)
        limit = self._max_queued if request else self._max_queued * 16
        if len(self._queue) >= limit or (request and self._bytes > MAX_FRAME):
            raise LinkError(f"{len(self._queue)} messages already wait to be sent: the worker does not read")
        self._queue.append(data)
        self._bytes += len(data)

    def take(self) -> bytes:
        """What waits, up to ``MAX_JOINED`` bytes, as one frame's content: a write costs more than what it carries.

        Empty: nothing waits.
        """
        queue = self._queue
        if not queue:
            return b""
        messages, size = [queue.popleft()], 0
        while queue and (size := size + len(messages[-1])) + len(queue[0]) <= MAX_JOINED:
            messages.append(queue.popleft())
        self._bytes -= sum(map(len, messages))
        return joined(messages)
