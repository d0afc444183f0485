"""Which transport an address is reached by."""

from __future__ import annotations

from collections.abc import Mapping

from workers.rpc.local_line import LocalLine
from workers.rpc.local_port import LocalPort
from workers.rpc.network import NetworkLine, NetworkPort
from workers.rpc.transport import Transport

NETWORK = Transport(NetworkLine, NetworkPort)
TRANSPORTS: Mapping[str, Transport] = {"unix": Transport(LocalLine, LocalPort)}
"""By the address's scheme; what has none of these is ``host:port`` and takes ``NETWORK``."""


def transport_of(address: str) -> Transport:
    """How to talk to who is at ``address``, and how to listen there."""
    return TRANSPORTS.get(address.partition(":")[0], NETWORK)
