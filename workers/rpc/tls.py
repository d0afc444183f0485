"""Mutual TLS between a gateway and workers on other machines: each end shows a certificate and checks the other's.

Rules
- A worker talks to nobody without a certificate of its ``ca``; a gateway to no worker whose certificate is not of its
  own ``ca`` and for the worker's name (``server_name``, else the address's host).
- Files are PEM. A gateway reads them for every connection that it opens, a worker when they change (``listening.py``).
- TLS 1.2 at least (gRPC's own minimum).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from workers.rpc.wire import SessionError

RETRY_S = 0.25
"""How soon a worker that does not listen yet is tried again."""
_WORD_S = 5.0
"""How long a worker may take to say its first word after the handshake."""
Stamps = tuple[tuple[int, int], ...] | None
"""What tells whether files have changed; None while one is missing."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""How a client of HTTP/2 begins: the preface and empty settings (RFC 9113 §3.4)."""


class TlsFilesError(ValueError):
    """A certificate cannot be used; the text names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where one end's certificate is, and whose it takes."""

    ca: Path
    cert: Path
    key: Path
    server_name: str | None = None
    """For a gateway: the name in the worker's certificate."""

    def stamps(self) -> Stamps:
        """Of all three files."""
        try:
            stats = [path.stat() for path in (self.ca, self.cert, self.key)]
        except OSError:
            return None
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)

    def check(self) -> None:
        """Raises TlsFilesError for files that cannot be read, do not belong together or are no PEM."""
        self.context()

    def context(self) -> ssl.SSLContext:
        """For a client made with the standard library. Raises TlsFilesError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        load_pair(context, self.cert, self.key)
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise TlsFilesError(f"{self.ca} holds no certificates ({error.strerror or error}); write a PEM") from None
        return context

    def for_client(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, Any]]]:
        """gRPC's credentials and channel options for a gateway. Raises TlsFilesError."""
        self.check()
        credentials = grpc.ssl_channel_credentials(  # type: ignore[no-untyped-call]
            self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        )
        named = self.server_name
        return credentials, [("grpc.ssl_target_name_override", named)] if named is not None else []

    def for_server(self) -> grpc.ServerCredentials:
        """gRPC's credentials for a worker. Raises TlsFilesError."""
        self.check()
        pair = [(self.key.read_bytes(), self.cert.read_bytes())]
        credentials: grpc.ServerCredentials = grpc.ssl_server_credentials(  # type: ignore[no-untyped-call]
            pair, root_certificates=self.ca.read_bytes(), require_client_auth=True
        )
        return credentials


def load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load a certificate with its key. Raises TlsFilesError, also for an encrypted key: nobody is there to ask."""
    for path in (cert, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise TlsFilesError(f"{path} cannot be read: {error.strerror}") from None
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise TlsFilesError(
            f"{cert} and {key} are no certificate and its private key ({reason}); both are PEM, the key not encrypted"
        ) from None


async def shake_hands(address: str, files: TlsFiles) -> None:
    """Try out TLS with a worker, once it listens. gRPC itself only ever says that nobody answers.

    Raises SessionError ``tls`` with what is wrong, when the two do not take each other's certificates.
    """
    host, _, port = address.rpartition(":")
    try:
        context = await asyncio.to_thread(files.context)
    except TlsFilesError as error:
        raise SessionError("tls", str(error)) from None
    while True:
        try:
            await _try(host.strip("[]"), int(port), context, files.server_name)
        except ssl.SSLCertVerificationError as error:
            raise SessionError("tls", f"the worker's certificate is refused: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise SessionError("tls", f"no TLS with this worker ({error.reason}): are both ends set up?") from None
        except OSError:
            await asyncio.sleep(RETRY_S)
        else:
            return


async def _try(host: str, port: int, context: ssl.SSLContext, name: str | None) -> None:
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)
    try:
        # With TLS 1.3 a server looks at our certificate after the handshake, and hangs up where HTTP/2 would begin.
        writer.write(_PREFACE)
        word = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(_WORD_S):
                word = await reader.read(1)
        if not word:
            raise SessionError("tls", "the worker hung up: it does not take this gateway's certificate")
    finally:
        writer.transport.abort()
