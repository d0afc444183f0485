"""Certificates of the listeners: renewed while they run, never replaced by one that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.cli.listener import Listener, bind, url_of
from gateway.compose import BuildError
from gateway.settings import Settings
from gateway.settings_tls import Tls
from gateway.tls import Certificate, Certificates, TlsError
from tests.certificates import Authority, Pair
from tests.gateway.conftest import Start
from tests.gateway.harness import BASE, merged


async def scheme(request: Request) -> Response:
    return PlainTextResponse(request.url.scheme)


APP = Starlette(routes=[Route("/", scheme)])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def certificate(pair: Pair) -> Certificate:
    return Certificate(Tls(cert=pair.cert.name, key=pair.key.name), pair.cert.parent, "listen")


@contextlib.asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[int]:
    bound = bind("127.0.0.1", 0, "listen")
    assert url_of(bound, tls=True).startswith("https://127.0.0.1:")
    listener = Listener(APP, bound, tls=context)
    await listener.start()
    try:
        yield bound.getsockname()[1]
    finally:
        await listener.stop(force=True)


class Connection:
    """One TLS connection of a client that trusts the authority."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, port: int, authority: Authority, **limits: ssl.TLSVersion) -> Connection:
        context = ssl.create_default_context(cafile=authority.cert)
        for name, value in limits.items():
            setattr(context, name, value)
        return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=context))

    @property
    def serial(self) -> int:
        """Of the certificate that was shown."""
        shown = self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(shown).serial_number

    async def get(self) -> bytes:
        self._writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 200")
        return await self._reader.readexactly(5)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def serial(pair: Pair) -> int:
    return x509.load_pem_x509_certificate(pair.cert.read_bytes()).serial_number


async def test_a_renewed_certificate_is_shown_to_new_connections_the_open_ones_go_on(authority: Authority) -> None:
    pair = authority.issue("gateway", "127.0.0.1")
    held = certificate(pair)
    async with listening(held.context) as port:
        first = await Connection.to(port, authority)
        assert (first.serial, await first.get()) == (serial(pair), b"https")
        assert held.renew() is False
        renewed = authority.issue("gateway", "127.0.0.1", file="renewed")
        number = serial(renewed)
        shutil.move(renewed.key, pair.key)
        shutil.move(renewed.cert, pair.cert)
        assert held.renew() is True
        second = await Connection.to(port, authority)
        assert (second.serial, await second.get(), await first.get()) == (number, b"https", b"https")
        for connection in (first, second):
            await connection.close()


async def test_a_pair_that_cannot_be_used_leaves_the_one_before(authority: Authority) -> None:
    pair = authority.issue("gateway", "127.0.0.1")
    number = serial(pair)
    held = certificate(pair)
    async with listening(held.context) as port:
        shutil.copy(authority.issue("other").key, pair.key)
        with pytest.raises(TlsError, match=r"listen\.tls: .*no certificate and its private key"):
            held.renew()
        assert held.renew() is False, "said once"
        pair.cert.unlink()
        with pytest.raises(TlsError, match="cannot be read"):
            held.renew()
        connection = await Connection.to(port, authority)
        assert (connection.serial, await connection.get()) == (number, b"https")
        await connection.close()


async def test_old_protocols_and_plain_text_are_refused(authority: Authority) -> None:
    held = certificate(authority.issue("gateway", "127.0.0.1"))
    async with listening(held.context) as port:
        old = {"minimum_version": ssl.TLSVersion.MINIMUM_SUPPORTED, "maximum_version": ssl.TLSVersion.TLSv1_2}
        connection = await Connection.to(port, authority, **old)
        assert await connection.get() == b"https"
        await connection.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200" not in await asyncio.wait_for(reader.read(), 30)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert held.context.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_changed_files_are_noticed_without_a_word(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tls.WATCH_S", 0.02)
    pair = authority.issue("gateway", "127.0.0.1")
    changes = {"listen": {"tls": {"cert": pair.cert.name, "key": pair.key.name}}}
    held = Certificates.of(Settings.model_validate(merged(BASE, changes)), tmp_path)
    assert held.listen is not None
    assert held.admin is None
    watch = asyncio.create_task(held.watch())
    async with listening(held.listen.context) as port:
        renewed = authority.issue("gateway", "127.0.0.1", file="renewed")
        number = serial(renewed)
        shutil.move(renewed.key, pair.key)
        shutil.move(renewed.cert, pair.cert)
        async with asyncio.timeout(30):
            while True:
                connection = await Connection.to(port, authority)
                await connection.close()
                if connection.serial == number:
                    break
                await asyncio.sleep(0.02)
    watch.cancel()
    await asyncio.wait({watch})


async def test_a_gateway_does_not_start_with_one_that_cannot_be_used(start: Start) -> None:
    for section in ("listen", "admin"):
        with pytest.raises(BuildError, match=rf"{section}\.tls: .*absent\.pem cannot be read"):
            async with start({section: {"tls": {"cert": "absent.pem", "key": "absent.key"}}}):
                raise AssertionError("unreachable")
