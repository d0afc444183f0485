"""Mutual TLS between gateway and worker: both certificates are checked, and what is wrong is said."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509

from tests.certificates import Authority, Pair
from workers.options import OptionsError, parse
from workers.protocol import PROTOCOL, Down, Hello, StepOutputs, WorkerStats
from workers.rpc import METHOD, SECRET_KEY, SessionError, TlsFiles, TlsFilesError, WorkerClient, WorkerServer, listening
from workers.rpc.heard import Heard

SECRET = "correct-horse-battery"
HELLO = Hello(PROTOCOL, "w", "m", "rev", "sha", 16, 64, 8, 4096)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files(authority: Authority, pair: Pair, **fields: str) -> TlsFiles:
    return replace(TlsFiles(authority.cert, pair.cert, pair.key), **fields)


Serve = Callable[[TlsFiles | None], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[WorkerServer] = []

    async def start(tls: TlsFiles | None) -> str:
        heard: list[Down] = []
        server = WorkerServer("127.0.0.1:0", heard.append, secret=SECRET, tls=tls)
        servers.append(server)
        await server.start()
        server.ready(HELLO)
        return server.address

    yield start
    for server in servers:
        await server.stop()


async def greeting(client: WorkerClient) -> object:
    await client.connect(10)
    try:
        return await anext(Heard(client))
    finally:
        await client.close()


async def refused(client: WorkerClient) -> SessionError:
    with pytest.raises(SessionError) as caught:
        await client.connect(10)
    assert SECRET not in str(caught.value)
    return caught.value


async def test_both_ends_show_a_certificate_and_talk(authority: Authority, serve: Serve) -> None:
    address = await serve(files(authority, authority.issue("worker", "127.0.0.1")))
    gateway = files(authority, authority.issue("gateway"))
    client = WorkerClient(address, SECRET, tls=gateway)
    assert await greeting(client) == HELLO


async def test_a_gateway_d7_needs_certificate_and_secret(authority: Authority, serve: Serve, tmp_path: Path) -> None:
    """gateway D7: without a certificate of the right authority nobody gets to the point where a secret is asked for."""
    address = await serve(files(authority, authority.issue("worker", "127.0.0.1")))
    gateway = files(authority, authority.issue("gateway"))
    assert (await refused(WorkerClient(address, "wrong", tls=gateway))).code == "unauthenticated"
    assert (await refused(WorkerClient(address, None, tls=gateway))).code == "unauthenticated"
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger")
    pair = stranger.issue("gateway")
    error = await refused(WorkerClient(address, SECRET, tls=TlsFiles(authority.cert, pair.cert, pair.key)))
    assert error.code == "tls"
    with pytest.raises(SessionError):  # without TLS at all: nobody answers
        await WorkerClient(address, SECRET).connect(1)


async def test_a_client_without_any_certificate_gets_no_call(authority: Authority, serve: Serve) -> None:
    address = await serve(files(authority, authority.issue("worker", "127.0.0.1")))
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())  # type: ignore[no-untyped-call]
    async with grpc.aio.secure_channel(address, credentials) as channel:
        call = channel.stream_stream(METHOD)(metadata=((SECRET_KEY, SECRET),), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_worker_with_another_name_or_authority_is_refused(
    authority: Authority, serve: Serve, tmp_path: Path
) -> None:
    address = await serve(files(authority, authority.issue("worker", "worker.example")))
    gateway = files(authority, authority.issue("gateway"))
    error = await refused(WorkerClient(address, SECRET, tls=gateway))
    assert error.code == "tls"
    assert "127.0.0.1" in error.detail
    assert await greeting(WorkerClient(address, SECRET, tls=replace(gateway, server_name="worker.example"))) == HELLO
    (tmp_path / "other").mkdir()
    trusting_others = replace(gateway, ca=Authority(tmp_path / "other", "stranger").cert)
    error = await refused(WorkerClient(address, SECRET, tls=trusting_others))
    assert (error.code, "certificate is refused" in error.detail) == ("tls", True)


async def test_a_worker_that_speaks_no_tls_is_told_apart(authority: Authority, serve: Serve) -> None:
    address = await serve(None)
    error = await refused(WorkerClient(address, SECRET, tls=files(authority, authority.issue("gateway"))))
    assert (error.code, "are both ends set up" in error.detail) == ("tls", True)


async def test_a_client_waits_for_a_worker_that_does_not_listen_yet(authority: Authority) -> None:
    tls = files(authority, authority.issue("both", "127.0.0.1"))
    server = WorkerServer("127.0.0.1:0", lambda message: None, secret=SECRET, tls=tls)
    await server.start()
    address = server.address
    await server.stop()
    client = WorkerClient(address, SECRET, tls=tls)
    connecting = asyncio.create_task(client.connect(20))
    await asyncio.sleep(0.3)
    assert not connecting.done()
    late = WorkerServer(address, lambda message: None, secret=SECRET, tls=tls)
    await late.start()
    await connecting
    await client.close()
    await late.stop()


async def test_a_gateways_renewed_certificate_is_used_by_its_next_connection(
    authority: Authority, serve: Serve, tmp_path: Path
) -> None:
    address = await serve(files(authority, authority.issue("worker", "127.0.0.1")))
    (tmp_path / "other").mkdir()
    pair, good = Authority(tmp_path / "other", "stranger").issue("gateway"), authority.issue("gateway")
    gateway = files(authority, pair)
    assert (await refused(WorkerClient(address, SECRET, tls=gateway))).code == "tls"
    shutil.move(good.key, pair.key)
    shutil.move(good.cert, pair.cert)
    assert await greeting(WorkerClient(address, SECRET, tls=gateway)) == HELLO


async def shown(address: str, gateway: TlsFiles) -> int:
    """The serial number of the certificate that a new connection is shown.

    One that waits at a listener that closes is reset, as by any server that is replaced: its client connects again.
    """
    host, port = address.split(":")
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(ConnectionResetError):
                _, writer = await asyncio.open_connection(host, int(port), ssl=gateway.context(), server_hostname=host)
                break
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der).serial_number
    finally:
        writer.transport.abort()


async def test_a_workers_renewed_certificate_is_shown_and_its_stream_goes_on(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listening, "WATCH_S", 0.05)
    pair, gateway = authority.issue("worker", "127.0.0.1"), files(authority, authority.issue("gateway"))
    server = WorkerServer("127.0.0.1:0", lambda message: None, secret=SECRET, tls=files(authority, pair))
    await server.start()
    server.ready(HELLO)
    client = WorkerClient(server.address, SECRET, tls=gateway)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        stack.push_async_callback(client.close)
        await client.connect(10)
        news = Heard(client)
        assert await anext(news) == HELLO
        first = await shown(server.address, gateway)

        pair.key.write_text("no key")
        async with asyncio.timeout(30):
            while "certificate_not_renewed" not in capsys.readouterr().out:
                await asyncio.sleep(0.02)
        assert await shown(server.address, gateway) == first

        authority.issue("worker", "127.0.0.1")
        async with asyncio.timeout(30):
            while await shown(server.address, gateway) == first:
                await asyncio.sleep(0.02)
        server.publish(StepOutputs(7, [], WorkerStats(free_blocks=3)))
        told = await anext(news)
        assert isinstance(told, StepOutputs)
        assert told.step == 7, "the stream that was open goes on"
        again = WorkerClient(server.address, SECRET, tls=gateway)
        assert await greeting(again) == HELLO


async def test_renewed_files_that_become_usable_without_a_trace_are_used(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by a change of mode: neither the time nor the file is another one."""
    monkeypatch.setattr(listening, "WATCH_S", 0.05)
    pair, gateway = authority.issue("worker", "127.0.0.1"), files(authority, authority.issue("gateway"))
    tls = files(authority, pair)
    server = WorkerServer("127.0.0.1:0", lambda message: None, secret=SECRET, tls=tls)
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        first = await shown(server.address, gateway)
        authority.issue("worker", "127.0.0.1")
        key = pair.key.read_text()
        pair.key.write_text("no key")
        times = pair.key.stat()
        said = ""
        async with asyncio.timeout(30):
            while "certificate_not_renewed" not in said:
                await asyncio.sleep(0.02)
                said += capsys.readouterr().out
        pair.key.write_text(key)
        os.utime(pair.key, ns=(times.st_atime_ns, times.st_mtime_ns))
        async with asyncio.timeout(30):
            while await shown(server.address, gateway) == first:
                await asyncio.sleep(0.02)


async def test_a_port_that_somebody_has_is_not_joined(authority: Authority, serve: Serve) -> None:
    tls = files(authority, authority.issue("worker", "127.0.0.1"))
    address = await serve(tls)
    second = WorkerServer(address, lambda message: None, secret=SECRET, tls=tls)
    with pytest.raises(OSError, match="cannot listen on"):
        await second.start()
    await second.stop()


async def test_one_worker_at_a_time_looks_for_a_port_and_takes_it(authority: Authority) -> None:
    """Between look and bind nobody else can come: who comes second waits for its turn, and finds the port taken."""
    tls = files(authority, authority.issue("worker", "127.0.0.1"))
    with socket.socket() as other, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as turn:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does: it would let itself be joined
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        turn.bind(f"\0forebay-port-{port}")
        second = WorkerServer(f"127.0.0.1:{port}", lambda message: None, secret=SECRET, tls=tls)
        starting = asyncio.create_task(second.start())
        await asyncio.sleep(0.1)
        assert not starting.done()
        other.listen()
        turn.close()
        with pytest.raises(OSError, match="cannot listen on"):
            await starting
        await second.stop()


async def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("worker"), authority.issue("other")
    for wrong, word in (
        (TlsFiles(authority.cert, tmp_path / "absent", pair.key), "absent cannot be read"),
        (TlsFiles(tmp_path / "absent", pair.cert, pair.key), "absent holds no certificates"),
        (TlsFiles(pair.key, pair.cert, pair.key), "holds no certificates"),
        (TlsFiles(authority.cert, pair.cert, other.key), "no certificate and its private key"),
        (TlsFiles(authority.cert, pair.key, pair.cert), "no certificate and its private key"),
    ):
        with pytest.raises(TlsFilesError, match=word):
            wrong.check()
        with pytest.raises(TlsFilesError):
            wrong.for_server()
    error = await refused(WorkerClient("127.0.0.1:1", SECRET, tls=TlsFiles(authority.cert, pair.cert, other.key)))
    assert error.code == "tls"


def test_a_workers_options_name_all_three_files_or_none() -> None:
    base = ["--source", "x", "--listen", "127.0.0.1:0"]
    env = {"FOREBAY_WORKER_SECRET": SECRET}
    whole = ["--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a"]
    assert parse([*base, *whole], env).tls_files == TlsFiles(Path("a"), Path("c"), Path("k"))
    assert parse(base, env).tls_files is None
    with pytest.raises(OptionsError, match="together"):
        parse([*base, "--tls-cert", "c"], env)
    with pytest.raises(OptionsError, match="UNIX socket takes no TLS"):
        parse(["--source", "x", "--listen", "unix:/s", *whole], env)
    with pytest.raises(OptionsError, match="wants a secret"):
        parse([*base, *whole], {})
