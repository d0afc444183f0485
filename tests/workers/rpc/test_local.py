"""Frames over a UNIX socket, as strangers and broken peers would speak them."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.rpc.talk import HELLO, SECRET, Serve, Worker, greeted
from workers.protocol import (
    Cancel,
    Down,
    Generate,
    Purged,
    SequenceOutput,
    Source,
    StepOutputs,
    WorkerStats,
    decode_down,
    encode,
    joined,
)
from workers.rpc import MAX_FRAME, SessionError, TlsFiles, WorkerClient, WorkerServer, local_line, local_port, pulse
from workers.rpc.connection import MAX_PATH, ours
from workers.rpc.frames import Ending, FrameReader, Kind, ending, frame, opening, read_ending
from workers.transfer.connector import Part, TransferError, Wanted
from workers.transfer.stream import GrpcConnector, handler

pytestmark = pytest.mark.timeout(60)


class Peer:
    """One end of a socket, in the test's hands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._frames = FrameReader()

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def next(self) -> tuple[Kind, bytes] | None:
        """The next frame; None at the end."""
        async with asyncio.timeout(30):
            while (taken := self._frames.take()) is None:
                try:
                    data = await self.reader.read(65536)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self._frames.feed(data)
        return taken

    async def last_word(self) -> Ending | None:
        """What it was told before the connection ended."""
        said = None
        while (taken := await self.next()) is not None:
            if taken[0] is Kind.END:
                said = read_ending(taken[1])
        return said


@asynccontextmanager
async def stranger(worker: Worker) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_unix_connection(worker.server.address.removeprefix("unix:"))
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def let_in(worker: Worker) -> AsyncIterator[Peer]:
    async with stranger(worker) as peer:
        peer.write(opening(SECRET))
        assert [await peer.next(), await peer.next()] == [(Kind.OPENED, b""), (Kind.MESSAGE, encode(HELLO))]
        yield peer


@asynccontextmanager
async def impostor(folder: Path, talk: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[WorkerClient]:
    """A client of a worker that behaves as ``talk`` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        assert (await peer.next() or (None,))[0] is Kind.OPEN
        await talk(peer)
        writer.close()

    server = await asyncio.start_unix_server(serve, folder / "s")
    client = WorkerClient(f"unix:{folder}/s", SECRET)
    try:
        yield client
    finally:
        await client.close()
        server.close()


def message(*messages: Down) -> bytes:
    return frame(Kind.MESSAGE, joined([encode(one) for one in messages]))


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40)), max_size=8), st.data())
def test_frames_come_whole_however_their_bytes_come(sent: list[tuple[Kind, bytes]], data: st.DataObject) -> None:
    stream = b"".join(frame(kind, content) for kind, content in sent)
    reader, taken = FrameReader(), list[tuple[Kind, bytes]]()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        reader.feed(stream[:size])
        stream = stream[size:]
        while (one := reader.take()) is not None:
            taken.append((one[0], bytes(one[1])))
    assert taken == sent
    assert len(reader) == 0


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "protocol"),
        (b"\x00" * 64, "protocol"),
        (frame(Kind.MESSAGE, joined([encode(Cancel("a"))])), "protocol"),
        (frame(Kind.OPEN, b"\xc1"), "protocol"),
        (frame(Kind.OPEN, b"\x81\xa6secret\xa1x"), "protocol"),
        (struct.pack(">BI", Kind.OPEN, local_port.MAX_OPENING + 1), "resource_exhausted"),
        (opening("wrong"), "unauthenticated"),
        (opening(None), "unauthenticated"),
        (opening(SECRET).replace(b"version\x01", b"version\x02"), "protocol"),
    ],
    ids=["http2", "zeros", "no opening", "no msgpack", "no version", "long", "wrong secret", "no secret", "version"],
)
async def test_gateway_d7_who_opens_otherwise_is_told_why_and_sent_away(
    serve_at: Serve, said: bytes, code: str
) -> None:
    """gateway D7: nothing of what a stranger says reaches the worker, and who is in stays in."""
    worker = await serve_at("unix")
    client = worker.client()
    await greeted(client)
    async with stranger(worker) as peer:
        peer.write(said + message(Cancel("from a stranger")))
        answer = await peer.last_word()
    assert answer is not None
    assert answer.code == code
    assert SECRET not in answer.detail
    client.send(Cancel("from its gateway"))
    await worker.until(lambda heard: heard == [Cancel("from its gateway")])
    await client.close()


async def test_gateway_d7_who_says_nothing_keeps_no_place(serve_at: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """gateway D7: places are few, and so are the seconds in one."""
    monkeypatch.setattr(local_port, "MAX_VISITORS", 1)
    monkeypatch.setattr(local_port, "OPENING_S", 0.5)
    worker = await serve_at("unix")
    async with stranger(worker) as first, stranger(worker) as second:
        assert await second.last_word() is None
        assert (await first.last_word() or Ending("", "")).code == "deadline_exceeded"
    client = worker.client()
    await greeted(client)
    await client.close()


def test_gateway_d7_only_its_own_user_and_root_may_connect() -> None:
    """gateway D7: whatever the socket's mode is."""

    class Connected:
        def __init__(self, user: int) -> None:
            self.user = user

        def getsockopt(self, *_: int) -> bytes:
            return struct.pack("3i", 1, self.user, 1)

    allowed = {user: ours(Connected(user)) for user in (0, os.geteuid(), os.geteuid() + 1)}  # type: ignore[arg-type]
    assert allowed == {0: True, os.geteuid(): True, os.geteuid() + 1: False}


async def test_gateway_d7_a_stranger_that_listens_is_told_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gateway D7: in a folder that others can write to somebody else may have been first."""
    heard = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        writer.close()
        heard.set()

    server = await asyncio.start_unix_server(serve, tmp_path / "s")
    monkeypatch.setattr(local_line, "ours", lambda connected: False)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(SessionError, match="another user: it is told no secret") as caught:
        await WorkerClient(f"unix:{tmp_path}/s", SECRET).connect(10)
    assert caught.value.code == "unauthenticated"
    await asyncio.wait_for(heard.wait(), 30)
    server.close()


async def test_a_path_that_is_too_long_for_a_socket_is_told_at_both_ends(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/{'x' * MAX_PATH}"
    said = f"a socket's path has at most {MAX_PATH} bytes"
    with pytest.raises(OSError, match=f"cannot listen on .*: {said}"):
        await Worker(address, SECRET).server.start()
    with pytest.raises(SessionError, match=f"cannot connect to .*: {said}"):
        await WorkerClient(address, SECRET).connect(10)


async def test_a_socket_where_somebody_listens_and_takes_nobody_in_is_in_use(tmp_path: Path) -> None:
    """A process that is stopped: to wait for it would stop the worker that starts."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(path)
        there.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
        assert errno.EAGAIN in [one.connect_ex(path) for one in waiting]
        with pytest.raises(OSError, match="somebody listens there"):
            await Worker(f"unix:{path}", SECRET).server.start()
        for one in waiting:
            one.close()


async def test_without_a_descriptor_for_it_a_connection_ends_at_once_at_both_ends(
    serve_at: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await serve_at("unix")

    def none_left(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", none_left)
        async with stranger(worker) as peer:
            assert await peer.next() is None
        with pytest.raises(SessionError, match="cannot write to the connection: Too many open files"):
            await worker.client().connect(20)
    client = worker.client()
    await greeted(client)
    await client.close()


async def test_the_socket_is_its_owners_alone_and_goes_with_the_worker(serve_at: Serve) -> None:
    worker = await serve_at("unix")
    path = Path(worker.server.address.removeprefix("unix:"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await worker.server.stop()
    assert not path.exists()


async def test_a_socket_that_a_killed_worker_left_is_taken_over_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    worker = Worker(f"unix:{path}", SECRET)
    await worker.server.start()
    worker.server.ready(HELLO)
    client = worker.client()
    await greeted(client)
    await client.close()
    await worker.server.stop()
    path.write_text("an operator's")
    with pytest.raises(OSError, match="cannot listen on unix:"):
        await Worker(f"unix:{path}", SECRET).server.start()
    assert path.read_text() == "an operator's"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (frame(Kind.MESSAGE, b"\xc1"), "invalid_argument"),
        (frame(Kind.MESSAGE), "invalid_argument"),
        (frame(Kind.MESSAGE, encode(Purged("p", 1))), "invalid_argument"),
        (struct.pack(">BI", Kind.MESSAGE, MAX_FRAME + 1), "resource_exhausted"),
        (opening(SECRET), "protocol"),
        (b"\x00", None),
        (b"\x00" * 5, "protocol"),
        (message(Cancel("x"))[:-1], None),
    ],
    ids=["no msgpack", "empty", "upwards", "long", "opening", "half a head", "no frame", "half a frame"],
)
async def test_a_gateway_that_talks_nonsense_loses_its_session_not_the_worker(
    serve_at: Serve, said: bytes, code: str | None
) -> None:
    worker = await serve_at("unix")
    async with let_in(worker) as peer:
        peer.write(message(Generate("a", [1], 4)))
        await worker.until(lambda heard: len(heard) == 1)
        peer.write(said)
        if code is None:
            peer.writer.write_eof()
            assert await peer.last_word() is None
        else:
            assert (await peer.last_word() or Ending("", "")).code == code
    await worker.until(lambda heard: heard[1:] == [Cancel("a")])
    worker.end("a")
    client = worker.client()
    await greeted(client)
    await client.close()


async def test_a_flood_of_cancels_is_heard_in_order_and_fills_nothing(serve_at: Serve) -> None:
    worker = await serve_at("unix")
    count = 20_000
    async with let_in(worker) as peer:
        for number in range(count):
            peer.write(message(Cancel(str(number))))
        await worker.until(lambda heard: len(heard) == count)
    assert worker.heard == [Cancel(str(number)) for number in range(count)]
    assert worker.server.live == []


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", "protocol"),
        (frame(Kind.MESSAGE, encode(HELLO)), "protocol"),
        (ending("unauthenticated", "no"), "unauthenticated"),
        (frame(Kind.END, b"\xc1"), "protocol"),
        (b"", "unavailable"),
    ],
    ids=["http2", "unopened", "refused", "no ending", "nothing"],
)
async def test_a_worker_that_answers_otherwise_is_no_worker(tmp_path: Path, said: bytes, code: str) -> None:
    async def talk(peer: Peer) -> None:
        peer.write(said)

    async with impostor(tmp_path, talk) as client:
        with pytest.raises(SessionError) as caught:
            await client.connect(10)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (frame(Kind.MESSAGE, b"\xc1"), "protocol"),
        (frame(Kind.OPENED), "protocol"),
        (b"\x00" * 5, "protocol"),
        (struct.pack(">BI", Kind.MESSAGE, MAX_FRAME + 1), "resource_exhausted"),
        (frame(Kind.MESSAGE, encode(HELLO))[:-1], "unavailable"),
        (b"", "unavailable"),
    ],
    ids=["no msgpack", "opened again", "no frame", "long", "half a frame", "gone"],
)
async def test_what_was_said_before_the_nonsense_is_heard(tmp_path: Path, said: bytes, code: str) -> None:
    """Half a frame is what a killed worker leaves: lost, like one that just went; its process tells more."""

    async def talk(peer: Peer) -> None:
        peer.write(frame(Kind.OPENED) + frame(Kind.MESSAGE, encode(HELLO)) + said)

    async with impostor(tmp_path, talk) as client:
        messages = await greeted(client)
        with pytest.raises(SessionError) as caught:
            await anext(messages)
    assert caught.value.code == code
    assert ("in the middle of a message" in caught.value.detail) == (said == frame(Kind.MESSAGE, encode(HELLO))[:-1])


async def test_a_gateway_without_a_sign_of_life_loses_its_session(
    serve_at: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, say, and its socket takes all. One that only answers is kept."""
    monkeypatch.setattr(pulse, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(pulse, "KEEPALIVE_TIMEOUT_S", 0.1)
    worker = await serve_at("unix")
    async with let_in(worker) as peer:
        for _ in range(3):
            assert await peer.next() == (Kind.PING, b"")
            peer.write(frame(Kind.PONG))
        peer.write(message(Generate("a", [1], 4)))
        await worker.until(lambda heard: heard == [Generate("a", [1], 4), Cancel("a")])
        assert not worker.server.connected


async def test_a_worker_without_a_sign_of_life_is_lost_once_it_has_greeted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it may be busy loading its model for longer than that."""
    monkeypatch.setattr(pulse, "KEEPALIVE_S", 0.02)
    monkeypatch.setattr(pulse, "KEEPALIVE_TIMEOUT_S", 1.0)  # who is late by half of it asks again
    pings = 0

    async def talk(peer: Peer) -> None:
        nonlocal pings
        peer.write(frame(Kind.OPENED))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.next(), 0.3)
        peer.write(frame(Kind.MESSAGE, encode(HELLO)) + frame(Kind.PING))
        assert await peer.next() == (Kind.PONG, b"")
        while await peer.next() == (Kind.PING, b""):
            pings += 1

    async with impostor(tmp_path, talk) as client:
        messages = await greeted(client)
        with pytest.raises(SessionError, match="no sign of life") as caught:
            await anext(messages)
    assert caught.value.code == "unavailable"
    assert pings == 1


async def test_who_stood_still_itself_asks_again_before_it_judges() -> None:
    """After a pause of this process the answer is there, but not read yet."""
    loop = asyncio.get_running_loop()
    told: list[str] = []
    one = pulse.Pulse(loop, lambda: told.append("ask"), lambda: told.append("lost"))
    one.start()
    one.heard_at -= pulse.KEEPALIVE_S
    one._look()
    one._due -= 2 * pulse.KEEPALIVE_TIMEOUT_S  # it should have looked so long ago
    one._look()
    assert told == ["ask", "ask"]
    one._look()
    assert told == ["ask", "ask", "lost"]
    one.stop()


async def test_what_is_sent_in_one_turn_goes_out_in_one_frame(serve_at: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[list[Down]] = []

    def noted(data: bytes) -> list[Down]:
        frames.append(decode_down(data))
        return frames[-1]

    monkeypatch.setattr("workers.rpc.reception.decode_down", noted)
    worker = await serve_at("unix")
    client = worker.client()
    await greeted(client)
    sent = [Generate("a", [1], 1), Generate("b", [1], 1), Cancel("a")]
    for one in sent:
        client.send(one)
    await worker.until(lambda heard: len(heard) == 3)
    assert frames == [sent]
    frames.clear()
    for one in (Generate("c", [1], 1), Cancel("c")):
        client.send(one)
        client.flush()
    client.flush()
    await worker.until(lambda heard: len(heard) == 5)
    assert frames == [[Generate("c", [1], 1)], [Cancel("c")]]
    await client.close()


async def test_many_megabytes_go_through_a_socket_that_takes_little(serve_at: Serve) -> None:
    worker = await serve_at("unix")
    client = worker.client()
    messages = await greeted(client)
    request = Generate("a", list(range(1_000_000)), 4)
    client.send(request)
    await worker.until(lambda heard: heard == [request])
    outputs = StepOutputs(1, [SequenceOutput("a", tokens=request.tokens, output_tokens=1_000_000)], WorkerStats())
    worker.server.publish(outputs)
    assert await anext(messages) == outputs
    await client.close()


async def test_what_a_listener_raises_ends_the_session(serve_at: Serve) -> None:
    worker = await serve_at("unix")
    client = worker.client()
    await client.connect(10)

    def on_message(_: object) -> None:
        raise LookupError("not the one")

    with pytest.raises(LookupError, match="not the one"):
        await client.listen(on_message)
    await client.close()


async def test_nobody_hears_more_once_listening_was_cancelled(serve_at: Serve) -> None:
    worker = await serve_at("unix")
    client = worker.client()
    await client.connect(10)
    heard: list[object] = []
    listening = asyncio.create_task(client.listen(heard.append))
    while not heard:
        await asyncio.sleep(0.001)
    client.send(Generate("a", [1], 4))
    await worker.until(lambda heard: len(heard) == 1)
    listening.cancel()
    await asyncio.wait({listening})
    worker.server.publish(StepOutputs(1, [SequenceOutput("a", tokens=[1], output_tokens=1)], WorkerStats()))
    await asyncio.sleep(0.02)
    assert heard == [HELLO]
    await client.close()


async def test_other_workers_are_answered_beside_it(tmp_path: Path) -> None:
    """Blocks come over gRPC, from a socket of their own; who asks needs a ticket."""
    part = Part([b"key"], b"bytes", 16)

    async def parts(wanted: Wanted) -> AsyncGenerator[Part, None]:
        if wanted.ticket != "ticket":
            raise TransferError("gone", "no such ticket")
        yield part

    os.chmod(tmp_path, 0o700)
    server = WorkerServer(f"unix:{tmp_path}/s", lambda _: None, secret=SECRET, blocks=handler(parts))
    await server.start()
    assert stat.S_IMODE((tmp_path / "s.kv").stat().st_mode) == 0o600
    pulled = [one async for one in GrpcConnector().pull(Source(server.blocks_address, "ticket"), "")]
    assert pulled == [part]
    with pytest.raises(TransferError, match="no such ticket"):
        await anext(GrpcConnector().pull(Source(server.blocks_address, "another"), ""))
    await server.stop()


def test_certificates_are_for_the_network(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes no TLS"):
        WorkerServer(f"unix:{tmp_path}/s", lambda _: None, secret=SECRET, tls=TlsFiles(tmp_path, tmp_path, tmp_path))


async def test_a_worker_of_an_older_release_is_no_worker(tmp_path: Path) -> None:
    """It listens with gRPC."""
    from workers.rpc.network import server

    old = server({}, 1)
    old.add_insecure_port(f"unix:{tmp_path}/s")
    await old.start()
    with pytest.raises(SessionError) as caught:
        await WorkerClient(f"unix:{tmp_path}/s", SECRET).connect(10)
    assert caught.value.code in ("protocol", "unavailable")
    await old.stop(0)
