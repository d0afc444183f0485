"""Certificates of the listeners: loaded at start, read again when their files change, on SIGHUP and on a reload.

Rules
- A pair that cannot be used is refused at start with its path in the configuration; later it is logged, and the one
  before stays in use. Connections that are open keep the certificate they began with.
- TLS 1.2 at least, HTTP/1.1 only. Files are read in a thread.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway import log
from gateway.settings import Settings
from gateway.settings_tls import Tls
from policies.locality import is_loopback
from workers.rpc import TlsFilesError
from workers.rpc.tls import load_pair

_log = log.get("tls")

WATCH_S = 2.0

Stamps = tuple[tuple[int, int], ...] | None
"""What tells whether files have changed; None while one is missing."""


class TlsError(ValueError):
    """A listener's certificate cannot be used; the text names its path in the configuration."""


class Certificate:
    """One listener's."""

    def __init__(self, tls: Tls, base_dir: Path, path: str) -> None:
        """``path``: the listener's in the configuration. Raises TlsError."""
        self._cert = base_dir / Path(tls.cert).expanduser()
        self._key = base_dir / Path(tls.key).expanduser()
        self._path = path
        self.context = _context()
        self._refused: Stamps = None
        self._stamps = self._load(self.context)

    @property
    def file(self) -> Path:
        """Where the certificate is."""
        return self._cert

    def renew(self) -> bool:
        """Read the files again where they have changed. Raises TlsError, once; the certificate before stays in use."""
        now = self._files()
        if now in (self._stamps, self._refused):
            return False
        self._refused = now
        self._load(_context())  # on trial: a key without its certificate must not get into the live one
        self._stamps = self._load(self.context)
        return True

    def _load(self, context: ssl.SSLContext) -> Stamps:
        stamps = self._files()
        try:
            load_pair(context, self._cert, self._key)
        except TlsFilesError as error:
            raise TlsError(f"{self._path}.tls: {error}") from None
        return stamps

    def _files(self) -> Stamps:
        try:
            stats = [path.stat() for path in (self._cert, self._key)]
        except OSError:
            return None
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)


@dataclass(frozen=True, slots=True)
class Certificates:
    """All listeners'; None for one without TLS."""

    listen: Certificate | None = None
    admin: Certificate | None = None

    @classmethod
    def of(cls, settings: Settings, base_dir: Path) -> Certificates:
        """Load what the configuration names. Raises TlsError."""
        return cls(
            Certificate(settings.listen.tls, base_dir, "listen") if settings.listen.tls is not None else None,
            Certificate(settings.admin.tls, base_dir, "admin") if settings.admin.tls is not None else None,
        )

    async def renew(self) -> None:
        """Take up changed files; what cannot be used is logged."""
        for certificate in (self.listen, self.admin):
            if certificate is None:
                continue
            try:
                if await asyncio.to_thread(certificate.renew):
                    _log.info("certificate_renewed", cert=str(certificate.file))
            except TlsError as error:
                _log.error("certificate_not_renewed", why=str(error))

    async def watch(self) -> None:
        """Look for changed files until cancelled."""
        while self.listen is not None or self.admin is not None:
            await asyncio.sleep(WATCH_S)
            await self.renew()


def unencrypted(addresses: Iterable[str]) -> Iterator[str]:
    """Addresses of other machines: without TLS prompts, answers and the secret can be read on the way."""
    for address in addresses:
        host = address.rpartition(":")[0].strip("[]")
        if not address.startswith("unix:") and not is_loopback(host):
            yield address


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
