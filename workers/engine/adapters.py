"""Which adapters the engine holds, and what becomes of one that is to go while requests use it. No torch.

Rules
- The engine thread is the only writer. What was read elsewhere comes in by ``install``; memory goes by ``sweep``.
- An adapter that is dropped takes no new request at once, and goes when no request is left that names it. Installed
  again before that, it stays.
- The bounds (count, bytes) hold for what is held, also for what is about to go. A refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from workers.adapters import LoadedAdapter
from workers.engine.compiling import Pending
from workers.engine.sequence import Sequence


class AdapterHost(Protocol):
    """What a runner with adapters offers. Called on the engine thread, between steps."""

    def install(self, digest: str, weights: object) -> None:
        """Use ``weights`` for sequences whose adapter is ``digest``."""
        ...

    def remove(self, digest: str) -> None:
        """Free what ``install`` was given; no sequence names it any more."""
        ...


@dataclass(frozen=True, slots=True)
class Install:
    """A message to the engine: what a loader read. ``done(error)`` is called with the outcome."""

    adapter: LoadedAdapter
    done: Callable[[str | None], None]


@dataclass(frozen=True, slots=True)
class Remove:
    """A message to the engine: let one go. ``done()`` is called when it has."""

    digest: str
    done: Callable[[], None]


@dataclass(slots=True)
class _Held:
    adapter: LoadedAdapter
    names: dict[str, None]
    """One content may have several."""
    leaving: list[Callable[[], None]] | None = None
    """It is to go; whom to tell when it has."""


class AdapterTable:
    """The adapters of one engine, by digest."""

    def __init__(self, host: AdapterHost | None = None, *, most: int = 0, room: int = 0) -> None:
        """``most``: adapters at once. ``room``: bytes that they may occupy together. Without a host: none ever."""
        self._host = host
        self._most = most
        self._room = room
        self._held: dict[str, _Held] = {}

    def __contains__(self, digest: str) -> bool:
        """Whether a new request may name it."""
        held = self._held.get(digest)
        return held is not None and held.leaving is None

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[LoadedAdapter]:
        """Those that new requests may name, once under each of their names. Any thread."""
        held = [one for one in list(self._held.values()) if one.leaving is None]
        return iter([replace(one.adapter, name=name) for one in held for name in list(one.names)])

    @property
    def bytes(self) -> int:
        """What all of them occupy. Any thread."""
        return sum(held.adapter.bytes for held in list(self._held.values()))

    def handle(self, message: Install | Remove) -> None:
        """One comes, or is to go at the next ``sweep`` that finds it unused."""
        if isinstance(message, Install):
            message.done(self.install(message.adapter))
        elif (held := self._held.get(message.digest)) is None:
            message.done()
        else:
            held.leaving = [*(held.leaving or ()), message.done]

    def install(self, adapter: LoadedAdapter) -> str | None:
        """Take it in. Returns why not, or None. One that is here already stays as it is."""
        held = self._held.get(adapter.digest)
        if held is not None:
            told, held.leaving = held.leaving or [], None
            held.names[adapter.name] = None
            for tell in told:
                tell()
            return None
        if self._host is None:
            return "this engine takes no adapters: give it engine.adapter_memory"
        if len(self._held) >= self._most:
            return f"{len(self._held)} adapters are loaded, engine.max_adapters={self._most}: drop one, or raise it"
        left = self._room - self.bytes
        if adapter.bytes > left:
            return (
                f"adapter {adapter.name!r} takes {adapter.bytes:,} bytes, {left:,} of engine.adapter_memory="
                f"{self._room:,} are left: drop one, or raise it"
            )
        self._host.install(adapter.digest, adapter.weights)
        self._held[adapter.digest] = _Held(adapter, {adapter.name: None})
        return None

    def sweep(self, requests: Mapping[str, Iterable[Sequence]], pending: Iterable[Pending]) -> None:
        """Free those that are to go and that none of these unfinished requests names."""
        going = {digest: held for digest, held in self._held.items() if held.leaving is not None}
        if not going:
            return
        used = {sequence.adapter for sequences in requests.values() for sequence in sequences}
        used |= {one.generate.adapter for one in pending}
        for digest, held in going.items():
            if digest not in used and self._host is not None:
                del self._held[digest]
                self._host.remove(digest)
                for tell in held.leaving or ():
                    tell()
