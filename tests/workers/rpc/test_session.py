"""The stream between gateway and worker: what every transport keeps to. Each test runs over each of them."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.workers.rpc.conftest import TRANSPORTS
from tests.workers.rpc.talk import HELLO, SECRET, Serve, Worker, greeted, heard_of
from workers.protocol import (
    Cancel,
    Down,
    Generate,
    Keep,
    Purge,
    Purged,
    SequenceOutput,
    StepOutputs,
    WorkerStats,
    decode_down,
)
from workers.rpc import MAX_FRAME, LinkError, SessionError, WorkerClient, WorkerServer
from workers.rpc.heard import Heard

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=TRANSPORTS)
def serve(request: pytest.FixtureRequest, serve_at: Serve) -> Serve:
    return partial(serve_at, request.param)


async def test_messages_go_both_ways(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    messages = await greeted(client)
    request = Generate("a", [1, 2, 3], 4)
    client.send(request)
    client.send(Purge("p", [b"x"]))
    await worker.until(lambda heard: len(heard) == 2)
    assert worker.heard == [request, Purge("p", [b"x"])]
    worker.server.publish(StepOutputs(1, [SequenceOutput("a", tokens=[9], output_tokens=1)], WorkerStats(7)))
    worker.server.purged(Purged("p", 3))
    received = [await anext(messages), await anext(messages)]
    assert StepOutputs(1, [SequenceOutput("a", tokens=[9], output_tokens=1)], WorkerStats(7)) in received
    assert Purged("p", 3) in received
    await client.close()


async def test_what_nobody_waits_for_goes_with_the_next_message(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[list[Down]] = []

    def noted(data: bytes) -> list[Down]:
        frames.append(decode_down(data))
        return frames[-1]

    monkeypatch.setattr("workers.rpc.reception.decode_down", noted)
    monkeypatch.setattr("workers.rpc.client.PATIENCE_S", 3600.0)
    worker = await serve()
    client = worker.client()
    await greeted(client)
    keep, request = Keep("a", True), Generate("b", [1], 1)
    client.send(keep)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.send(request)
    await worker.until(lambda heard: len(heard) == 2)
    assert frames == [[keep, request]]
    await client.close()


async def test_what_nobody_waits_for_goes_alone_after_a_while(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    await greeted(client)
    client.send(Keep("a", True))
    await worker.until(lambda heard: len(heard) == 1)
    client.send(Keep("b", False))
    await worker.until(lambda heard: heard == [Keep("a", True), Keep("b", False)])
    await client.close()


async def test_the_end_of_a_session_says_what_is_unsent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rpc.client.PATIENCE_S", 3600.0)
    worker = await serve()
    client = worker.client()
    await greeted(client)
    client.send(Keep("a", True))
    await client.close()
    await worker.until(lambda heard: heard == [Keep("a", True)])


async def test_hello_waits_for_the_model(serve: Serve) -> None:
    worker = await serve(ready=False)
    client = worker.client()
    await client.connect(10)
    messages = Heard(client)
    first = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0.05)
    assert not first.done()
    worker.server.ready(HELLO)
    assert await asyncio.wait_for(first, 30) == HELLO
    await client.close()


async def test_a_worker_without_a_model_says_why(serve: Serve) -> None:
    """To the gateway that waits for it, and to one that comes before the worker has ended."""
    worker = await serve(ready=False)
    why = "engine.tensor_parallel=3 does not divide the model; write 1"
    await worker.server.refuse("nobody hears this one, and nothing is kept of it")
    worker = await serve(ready=False)
    waiting, late = worker.client(), worker.client()
    await waiting.connect(10)
    first = asyncio.ensure_future(anext(Heard(waiting)))
    await asyncio.sleep(0)
    refusing = asyncio.create_task(worker.server.refuse(why))
    with pytest.raises(SessionError, match="failed_precondition: " + why):
        await asyncio.wait_for(first, 30)
    await asyncio.wait_for(refusing, 30)
    await late.connect(10)
    with pytest.raises(SessionError, match=why):
        await asyncio.wait_for(anext(Heard(late)), 30)
    for client in (waiting, late):
        await client.close()


async def test_a_client_waits_for_a_worker_that_does_not_listen_yet(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/late"
    os.chmod(tmp_path, 0o700)
    client = WorkerClient(address)
    connecting = asyncio.create_task(client.connect(20))
    await asyncio.sleep(0.2)
    assert not connecting.done()
    worker = Worker(address, None)
    await worker.server.start()
    await connecting
    await client.close()
    await worker.server.stop()


async def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(SessionError) as caught:
        await WorkerClient(f"unix:{tmp_path}/nobody").connect(0.2)
    assert caught.value.code == "unavailable"


@pytest.mark.parametrize("offered", [None, "wrong", SECRET + "x", SECRET[:-1], "correct horse"])
async def test_gateway_d7_a_caller_without_the_secret_is_refused(serve: Serve, offered: str | None) -> None:
    """gateway D7: the worker's port takes only its gateway."""
    worker = await serve()
    with pytest.raises(SessionError) as caught:
        await WorkerClient(worker.server.address, offered).connect(10)
    assert caught.value.code == "unauthenticated"
    assert SECRET not in str(caught.value)
    assert worker.heard == []


def test_gateway_d7_a_port_that_is_open_to_anybody_does_not_open(tmp_path: Path) -> None:
    """gateway D7: TCP without a secret, or a socket in a directory that others can enter."""
    with pytest.raises(ValueError, match="open to anybody"):
        WorkerServer("127.0.0.1:0", lambda message: None)
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ValueError, match="chmod 0700"):
        WorkerServer(f"unix:{tmp_path}/s", lambda message: None)
    with pytest.raises(ValueError, match="printable ASCII"):
        WorkerServer("127.0.0.1:0", lambda message: None, secret="ünïcode")
    WorkerServer(f"unix:{tmp_path}/s", lambda message: None, secret=SECRET)


async def test_a_port_in_use_is_an_error_that_names_it(serve: Serve) -> None:
    worker = await serve()
    with pytest.raises(OSError, match=worker.server.address):
        await Worker(worker.server.address, SECRET).server.start()


async def test_a_message_larger_than_a_frame_is_not_sent(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    await greeted(client)
    with pytest.raises(LinkError, match="bytes"):
        client.send(Purge("p", [bytes(MAX_FRAME + 1)]))
    client.send(Cancel("still works"))
    await worker.until(lambda heard: heard == [Cancel("still works")])
    await client.close()


async def test_a_slow_reader_gets_fewer_messages_and_every_token(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    await client.connect(10)
    client.send(Generate("a", [1], 100_000))
    await worker.until(lambda heard: len(heard) == 1)
    steps, per_step = 2000, 64

    def engine() -> None:
        for number in range(steps):
            tokens = list(range(number * per_step, (number + 1) * per_step))
            output = SequenceOutput("a", tokens=tokens, output_tokens=(number + 1) * per_step)
            worker.server.publish(StepOutputs(number + 1, [output], WorkerStats(hot_prefixes=[bytes(32)] * 64)))

    thread = threading.Thread(target=engine)
    thread.start()
    await asyncio.to_thread(thread.join)  # the loop runs on, but nobody listens
    messages = Heard(client)
    assert await anext(messages) == HELLO
    count, tokens, last = 0, [], 0
    async with asyncio.timeout(30):
        while len(tokens) < steps * per_step:
            message = await anext(messages)
            assert isinstance(message, StepOutputs)
            assert message.step > last
            last = message.step
            count += 1
            tokens += message.outputs[0].tokens
    assert tokens == list(range(steps * per_step))
    assert count < steps / 2
    await client.close()


async def test_a_new_session_replaces_the_old_and_cancels_its_requests(serve: Serve) -> None:
    worker = await serve()
    old, new = worker.client(), worker.client()
    old_messages = await greeted(old)
    old.send(Generate("a", [1], 4))
    old.send(Generate("b", [1], 4))
    await worker.until(lambda heard: len(heard) == 2)
    await new.connect(10)
    with pytest.raises(SessionError) as caught:
        await anext(old_messages)
    assert caught.value.code == "aborted"
    await worker.until(lambda heard: set(map(repr, heard[2:])) == {repr(Cancel("a")), repr(Cancel("b"))})
    new_messages = Heard(new)
    hello = asyncio.ensure_future(anext(new_messages))
    worker.end("a")
    await asyncio.sleep(0.05)
    assert not hello.done(), "the engine still holds b"
    worker.end("b")
    assert await asyncio.wait_for(hello, 30) == HELLO
    new.send(Generate("a", [2], 4))  # the same id, in the new session
    await worker.until(lambda heard: heard[-1] == Generate("a", [2], 4))
    worker.server.publish(StepOutputs(5, [SequenceOutput("a", tokens=[2], output_tokens=1)], WorkerStats()))
    assert await heard_of(new_messages, 1) == [2]
    for client in (old, new):
        await client.close()


async def test_a_wrong_secret_replaces_nobody(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    messages = await greeted(client)
    with pytest.raises(SessionError):
        await WorkerClient(worker.server.address, "wrong").connect(10)
    client.send(Generate("a", [1], 1))
    await worker.until(lambda heard: len(heard) == 1)
    worker.server.publish(StepOutputs(1, [SequenceOutput("a", tokens=[4], output_tokens=1)], WorkerStats()))
    assert await heard_of(messages, 1) == [4]
    await client.close()


async def test_the_end_of_a_session_cancels_its_requests(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    await greeted(client)
    client.send(Generate("a", [1], 4))
    client.send(Generate("done", [1], 4))
    await worker.until(lambda heard: len(heard) == 2)
    worker.end("done")
    await client.close()
    await worker.until(lambda heard: heard[2:] == [Cancel("a")])
    assert not worker.server.connected


async def test_an_id_that_is_running_does_not_run_twice(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    await greeted(client)
    client.send(Generate("a", [1], 4))
    client.send(Generate("a", [2], 4))
    client.send(Cancel("x"))
    await worker.until(lambda heard: heard == [Generate("a", [1], 4), Cancel("x")])
    await client.close()


async def test_an_ended_session_ends_in_good_order_with_all_that_was_said(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    messages = await greeted(client)
    client.send(Generate("a", [1], 4))
    await worker.until(lambda heard: len(heard) == 1)
    worker.server.publish(
        StepOutputs(1, [SequenceOutput("a", tokens=[3], output_tokens=1, finish="length")], WorkerStats())
    )
    await worker.server.end_session()
    assert await heard_of(messages, 100) == [3]
    await client.close()


async def test_a_worker_that_goes_away_breaks_the_stream(serve: Serve) -> None:
    worker = await serve()
    client = worker.client()
    messages = await greeted(client)
    await worker.server.stop()
    with pytest.raises(SessionError):
        async with asyncio.timeout(30):
            await anext(messages)
    await client.close()
    with pytest.raises(LinkError, match="ended"):
        client.send(Cancel("a"))


async def test_the_outbound_line_is_bounded_for_requests_and_has_room_for_cancels(serve: Serve) -> None:
    worker = await serve()
    client = worker.client(max_queued=3)
    await greeted(client)
    for number in range(3):  # the loop does not run in between: nothing leaves the line
        client.send(Generate(f"r{number}", [1], 1))
    with pytest.raises(LinkError, match="does not read"):
        client.send(Generate("one too many", [1], 1))
    for number in range(3):
        client.send(Cancel(f"r{number}"))
    await worker.until(lambda heard: len(heard) == 6)
    client.send(Generate("fits again", [1], 1))
    await worker.until(lambda heard: heard[-1] == Generate("fits again", [1], 1))
    await client.close()


async def test_messages_before_connect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LinkError):
        WorkerClient(f"unix:{tmp_path}/s").send(Cancel("a"))
