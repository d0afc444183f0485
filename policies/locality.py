"""Whether a host is this machine: who needs no token, no credential and no encryption."""

from __future__ import annotations

import ipaddress


def host_name(host: str) -> str:
    """``[::1]:8081`` → ``::1``, ``localhost:8081`` → ``localhost``; empty for what names no host."""
    if host.startswith("["):
        name, end, _ = host[1:].partition("]")
        return name if end else ""
    return host.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a name or address, without port. Of names, localhost alone is trusted."""
    if host.lower() == "localhost":
        return True
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
