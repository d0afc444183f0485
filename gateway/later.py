"""What is to be counted, noted now and booked later: a note costs a request next to nothing.

Rules
- Belongs to the event loop. Whoever reads the metrics books first; so does every request at its end, and a timer ten
  times a second (``Metrics.watch_loop``): no more waits than comes in between.
- Charges are added up per tenant and class: they come with every token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from policies.types import Charge

Note = tuple[Callable[[Any], None], Any]
"""What counts, and what it is called with."""

BookService = Callable[[str, str, Mapping[str, int]], None]
"""Tenant, class, tokens by kind."""


class Later:
    """Notes of one gateway."""

    def __init__(self, book_service: BookService) -> None:
        self._book_service = book_service
        self._notes: deque[Note] = deque()
        self.note: Callable[[Note], None] = self._notes.append
        """Takes one."""
        self._charges: dict[tuple[str, str], dict[str, int]] = {}

    def served(self, tenant: str, service_class: str, charge: Charge) -> None:
        """Tokens were charged."""
        charged = self._charges.get((tenant, service_class))
        if charged is None:
            charged = self._charges[tenant, service_class] = {"prompt": 0, "cached": 0, "output": 0}
        charged["prompt"] += charge.prompt
        charged["cached"] += charge.cached
        charged["output"] += charge.output

    def book(self) -> None:
        """Count what was noted."""
        notes, charges = self._notes, self._charges
        while notes:
            count, what = notes.popleft()
            count(what)
        while charges:
            (tenant, service_class), charged = charges.popitem()
            self._book_service(tenant, service_class, charged)
