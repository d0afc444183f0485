"""Requests whose grammar is being compiled: they are no sequences yet, so that no step ever waits for a compiler.

Rules
- The engine thread is the only writer. A request is here, or in the planner, or gone: ``add`` and ``take`` move it.
- Cancels that name one choice wait here with their request and are applied when it has sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from workers.engine.constraint import Compiled
from workers.protocol import Cancel, Generate


@dataclass(frozen=True, slots=True)
class Ready:
    """A compiler's answer, as a message to the engine."""

    id: str
    constraints: Compiled


@dataclass(slots=True)
class Pending:
    """A request that waits for its grammar."""

    generate: Generate
    received_ns: int
    cancels: list[Cancel] = field(default_factory=list)


class Compiling:
    """The waiting room."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def add(self, generate: Generate, now: int) -> None:
        """A request whose compiler was started."""
        self._pending[generate.id] = Pending(generate, now)

    def take(self, request_id: str) -> Pending | None:
        """The request, which leaves; None when it was cancelled meanwhile."""
        return self._pending.pop(request_id, None)

    def cancel(self, message: Cancel) -> Pending | None:
        """The request that a cancel ends, which leaves; None when it names one choice (kept) or nobody here."""
        pending = self._pending.get(message.id)
        if pending is None:
            return None
        if message.index is None:
            return self._pending.pop(message.id)
        pending.cancels.append(message)
        return None

    def take_all(self) -> list[Pending]:
        """Everybody; the room is empty afterwards."""
        everybody = list(self._pending.values())
        self._pending.clear()
        return everybody
