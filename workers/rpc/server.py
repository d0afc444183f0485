"""The worker's end of the stream. The rules are in ``workers.rpc``."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from workers.protocol import AdapterAnswer, Down, Hello, Purged, StepOutputs
from workers.rpc.reception import Reception
from workers.rpc.schemes import transport_of
from workers.rpc.tls import TlsFiles

if TYPE_CHECKING:
    import grpc


class WorkerServer:
    """The worker's end. All methods but ``publish`` and ``purged`` belong to the event loop's thread."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[Down], None],
        *,
        secret: str | None = None,
        tls: TlsFiles | None = None,
        blocks: grpc.RpcMethodHandler | None = None,
    ) -> None:
        """``address``: ``unix:/path`` or ``host:port`` (port 0 picks one). ``on_message`` must not block or raise.

        It gets what the gateway sends, and a ``Cancel`` for every request of a session that ended. ``tls``: only
        clients with a certificate are talked to. ``blocks``: how other workers are answered (``workers.transfer``).
        Raises ValueError where the port would be open to anybody.
        """
        if secret is not None and not (secret and secret.isascii() and secret.isprintable()):
            raise ValueError("the worker's secret must be one or more printable ASCII characters")
        if secret is None:
            _require_private_socket(address)
        self.address = address
        self._reception = Reception(on_message, secret.encode() if secret is not None else None)
        self._port = transport_of(address).port(self._reception, tls, blocks)

    @property
    def live(self) -> list[str]:
        """Requests of the open session that have not ended."""
        return self._reception.outbox.live

    @property
    def connected(self) -> bool:
        """Is there a session?"""
        return self._reception.connected

    @property
    def blocks_address(self) -> str:
        """Where other workers are answered, if not where gateways are."""
        return self._port.blocks_address

    async def start(self) -> None:
        """Listen. Sets ``address`` to the real one. Raises OSError when it cannot."""
        self._reception.open()
        self.address = await self._port.start(self.address)

    def ready(self, hello: Hello) -> None:
        """The model is loaded: greet the waiting gateway, and every later one."""
        self._reception.ready(hello)

    async def refuse(self, reason: str, timeout_s: float = 2.0) -> None:
        """There will be no model: the gateway that waits for a greeting hears why, and so does one that comes now."""
        await self._reception.refuse(reason, timeout_s)

    def renew(self, hello: Hello) -> None:
        """What every later gateway is told instead."""
        self._reception.renew(hello)

    def publish(self, outputs: StepOutputs) -> None:
        """Send one step's news; merged with what is unsent while the reader is slow. From any thread, never blocks."""
        self._reception.outbox.put(outputs)

    def purged(self, receipt: Purged | AdapterAnswer) -> None:
        """Answer a purge, or an adapter's coming or going. From any thread."""
        self._reception.outbox.put_receipt(receipt)

    async def end_session(self, timeout_s: float = 5.0) -> None:
        """Send what is unsent and end the stream in good order (after a drain)."""
        await self._reception.end_session(timeout_s)

    async def stop(self) -> None:
        """Close the port and every stream."""
        await self._port.stop()
        self._reception.close()


def _require_private_socket(address: str) -> None:
    if not address.startswith("unix:"):
        raise ValueError(f"a worker on {address} would be open to anybody: give it a secret, or a unix:/path address")
    folder = Path(address.removeprefix("unix:")).parent
    mode = folder.stat().st_mode
    if stat.S_IMODE(mode) & 0o077 or folder.stat().st_uid != os.geteuid():
        raise ValueError(f"{folder} can be entered by others: chmod 0700 it, or give the worker a secret")
