"""What crosses between two workers, and the one interface that it crosses through."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from workers.protocol import Source


class Wanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a reader asks for."""

    ticket: str
    layout: str
    """Of the reader's cache: blocks of any other are of no use to it."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some blocks in a row. Parts come in the prompt's order, from its first block on."""

    keys: list[bytes]
    """Chain keys, one per block."""
    data: bytes
    """The blocks one after the other, each as the source's cache saves it."""
    computed: int
    """How many of all these blocks' tokens the source computed for this request; the others it had cached. The same in
    every part."""


class TransferError(Exception):
    """The blocks do not come. ``reason``, for metrics: ``gone``, ``layout``, ``broken``, ``keys`` or ``room``."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason = reason


class Connector(Protocol):
    """Brings blocks here. Belongs to the event loop."""

    def pull(self, source: Source, layout: str) -> AsyncGenerator[Part, None]:
        """The parts of what ``source`` names, as they come; waits until they are computed. Raises TransferError.

        The next part is asked for when this one has been dealt with. Closing the iterator ends the lease.
        """
        ...
