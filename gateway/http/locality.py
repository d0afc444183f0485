"""Whether a host is this machine: who may use the admin listener without a token."""

from __future__ import annotations

import ipaddress


def host_name(host: str) -> str:
    """``[::1]:8081`` → ``::1``, ``localhost:8081`` → ``localhost``; empty for what names no host."""
    if host.startswith("["):
        name, end, _ = host[1:].partition("]")
        return name if end else ""
    return host.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a name or address, without port, is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
