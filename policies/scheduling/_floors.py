"""Floors: a part of the service that a group of jobs gets while it has some waiting, whatever goes before it.

Rules
- While a group with a floor waits, its credit grows by share · cost of all that is served, and shrinks by what it is
  served itself. A group with credit is due: it goes before everybody, the largest credit first.
- So a group that waits all the time is served at least share · total, less about one job and what runs at once.
- Idling earns nothing: credit left over is dropped when a group comes back. A debt stays, but service that a group gets
  in its ordinary turn leaves it at most that one job in debt: it may use an idle machine without paying for it later.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

G = TypeVar("G", bound=Hashable)


class Floors(Generic[G]):
    """O(groups with a floor) per call: a handful."""

    def __init__(self) -> None:
        self._shares: dict[G, float] = {}
        self.granted = False
        """Whether any group has a floor: else nothing needs to be told here."""
        self._credit: dict[G, float] = {}
        self._waiting: dict[G, None] = {}  # in order of entry: a set's order differs from process to process

    def grant(self, group: G, share: float) -> None:
        """Give the group a floor, on top of what it has."""
        self._shares[group] = self._shares.get(group, 0.0) + share
        self._credit.setdefault(group, 0.0)
        self.granted = True

    def share(self, group: G) -> float:
        """Its floor; 0 without one."""
        return self._shares.get(group, 0.0)

    def wait(self, group: G, waits: bool) -> None:
        """Jobs of the group wait now, or none does any more."""
        if not waits:
            self._waiting.pop(group, None)
        elif group in self._shares and group not in self._waiting:
            self._waiting[group] = None
            self._credit[group] = min(0.0, self._credit[group])

    def due(self) -> list[G]:
        """Groups with credit that wait, largest credit first."""
        due = [group for group in self._waiting if self._credit[group] > 0]
        if len(due) > 1:
            due.sort(key=lambda group: -self._credit[group])
        return due

    def serve(self, group: G, cost: float, *, ordinary: bool = False) -> None:
        """``cost`` of the group's work was started, or corrected by (then it may be negative).

        ``ordinary``: it was started in the group's ordinary turn, not because it was due.
        """
        for waiting in self._waiting:
            self._credit[waiting] += self._shares[waiting] * cost
        if group in self._shares:
            left = self._credit[group] - cost
            self._credit[group] = max(left, -cost) if ordinary else left

    def dump(self) -> dict[str, float]:
        """Credits."""
        return {str(group): credit for group, credit in self._credit.items()}

    def load(self, dumped: Mapping[str, Any], groups: Mapping[str, G]) -> None:
        """Take over credits. ``groups``: by their names in the dump."""
        for name, credit in dumped.items():
            group = groups.get(name)
            if group in self._credit and isinstance(credit, int | float):
                self._credit[group] = float(credit)
