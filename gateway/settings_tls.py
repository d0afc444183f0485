"""The YAML's keys about certificates: ``listen.tls``, ``admin.tls``, ``models[].pools[].launch.tls``."""

from __future__ import annotations

from pydantic import Field

from gateway.settings_base import Section


class Tls(Section):
    """A listener's certificate: PEM files, read again when they change. Relative paths start at the YAML's folder."""

    cert: str = Field(min_length=1)
    """The certificate, followed by those between it and the root."""
    key: str = Field(min_length=1)
    """Its private key, not encrypted."""


class LaunchTls(Tls):
    """Mutual TLS with static workers: who may connect, and to whom."""

    ca: str = Field(min_length=1)
    """Certificates of the authorities that sign workers' certificates."""
    server_name: str | None = None
    """The name in the workers' certificate; null: each address's host."""
