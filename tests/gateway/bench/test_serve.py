"""``bench serve`` against a real gateway with echo workers, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.bench import online, traffic
from gateway.bench.display import Display
from gateway.bench.metrics import Slo
from gateway.bench.report import BenchError, Report
from gateway.bench.serve import Server
from gateway.bench.traffic import Prompts, Tenant
from gateway.cli.commands import app
from gateway.cli.output import UserError
from tests.gateway.harness import MODEL, Site, running, token
from workers.testing import Echo

ECHO = Echo(step_s=0.002)
loops = pytest.mark.asyncio(loop_scope="module")


def plan(callers: list[Tenant], **fields: Any) -> online.Plan:
    defaults: dict[str, Any] = {
        "callers": callers,
        "prompts": Prompts(256),
        "inputs": traffic.lengths("24", "--input"),
        "outputs": traffic.lengths("6", "--output"),
        "warm_up": 1,
    }
    return online.Plan(**{**defaults, **fields})


async def attack(server: Server, asked: online.Plan) -> Report:
    with Display() as display:
        return await online.measure(server, asked, display)


@loops
async def test_closed_loop_open_loop_and_replay(shared: Site, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("arrival,tenant,prompt,output\n0,alpha,20,4\n0.1,beta,30,5\n0.2,beta,10,6\n")
    callers = [Tenant("alpha", token("alpha")), Tenant("beta", token("beta"), 2.0)]
    asked = plan(callers, concurrency=[3], rates=[40.0], replay=log, speed=2.0, requests=12, slo=Slo(ttft_ms=60_000))
    report = await attack(Server(shared.url + "/v1", ""), asked)
    assert report.versions["model"] == MODEL
    closed, opened, replay = report.runs
    for run, count, output in ((closed, 12, 72), (opened, 12, 72), (replay, 3, 15)):
        assert run["failed"] == 0, run.get("errors")
        assert run["requests"] == count
        assert run["output_tokens"] == output, "usage is what counts"
        assert run["ttft_p50_ms"] > 0
        assert run["cached_tokens"] == 0
        assert run["goodput_share"] == 1
        assert set(run["tenants"]) == {"alpha", "beta"}
    assert closed["tenants"]["beta"]["requests"] == 8
    assert closed["input_tokens"] == 12 * 24
    assert replay["tenants"]["beta"]["output_tokens"] == 11
    assert opened["sent_late_p99_ms"] >= 0
    json.dumps(report.to_json())


@loops
async def test_the_gateways_own_counters(shared: Site) -> None:
    asked = plan(
        [Tenant("alpha", token("alpha"))], concurrency=[2], requests=6, metrics_urls=[f"{shared.admin_url}/metrics"]
    )
    [run] = (await attack(Server(shared.url, MODEL), asked)).runs
    assert run["server_queue_mean_ms"] >= 0
    wrong = plan([Tenant("alpha", token("alpha"))], concurrency=[2], metrics_urls=[f"{shared.url}/nothing"])
    with pytest.raises(BenchError, match="http_404"):
        await attack(Server(shared.url, MODEL), wrong)


@loops
async def test_chats_are_words(shared: Site) -> None:
    asked = plan([Tenant("alpha", token("alpha"))], concurrency=[2], requests=3, prompts=Prompts(256, as_text=True))
    [run] = (await attack(Server(shared.url, MODEL, "chat"), asked)).runs
    assert (run["failed"], run["output_tokens"]) == (0, 18)
    assert run["input_tokens"] > 3 * 24, "the server's count, with its template"


@loops
async def test_refusals_are_counted_by_code_and_nothing_is_retried(tmp_path: Path) -> None:
    limits = {"tenants": [{"id": "alpha", "limits": {"requests_per_minute": 4}}]}
    async with running(tmp_path, limits) as site:
        asked = plan([Tenant("alpha", token("alpha"))], concurrency=[2], requests=8, warm_up=0)
        [run] = (await attack(Server(site.url, MODEL), asked)).runs
    assert run["failed"] == 4
    assert run["errors"] == {"http_429": 4}
    assert run["output_tokens"] == 4 * 6


@loops
async def test_a_wrong_key_stops_at_the_warm_up(shared: Site) -> None:
    with pytest.raises(BenchError, match="warm-up failed: http_401"):
        await attack(Server(shared.url, MODEL), plan([Tenant("alpha", "wrong")], concurrency=[1]))
    with pytest.raises(BenchError, match="/v1/models cannot be read: http_401"):
        await attack(Server(shared.url, ""), plan([Tenant("alpha", "wrong")], concurrency=[1]))


@contextlib.asynccontextmanager
async def speaking(*events: str) -> AsyncIterator[str]:
    """A server that answers every request with these events; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await listener.wait_closed()


TOKEN = '{"choices": [{"text": "x"}]}'


@loops
@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((TOKEN,), "stream_incomplete"),
        ((TOKEN, '{"error": {"code": "worker_lost", "message": "gone"}}'), "stream_worker_lost"),
        ((TOKEN, "{"), "not_json"),
    ],
)
async def test_a_stream_that_breaks_is_no_success(events: tuple[str, ...], code: str) -> None:
    async with speaking(*events) as url:
        [run] = (await attack(Server(url, "m"), plan([Tenant("a", "")], concurrency=[1], requests=2, warm_up=0))).runs
    assert run["errors"] == {code: 2}


@loops
async def test_events_without_text_are_no_tokens_and_usage_may_be_missing() -> None:
    events = ('{"choices": [{"delta": {"role": "assistant"}}]}', '{"choices": [{"delta": {"content": "x"}}]}')
    async with speaking(*events, '{"choices": [{"delta": {}, "finish_reason": "stop"}]}', "[DONE]") as url:
        [run] = (await attack(Server(url, "m"), plan([Tenant("a", "")], concurrency=[1], requests=2, warm_up=0))).runs
    assert (run["failed"], run["output_tokens"]) == (0, 2)


@loops
async def test_a_server_without_models_asks_for_a_name() -> None:
    async with speaking() as url:
        with pytest.raises(BenchError, match="--model"):
            await attack(Server(url, ""), plan([Tenant("a", "")], concurrency=[1]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--endpoint", "embeddings"], "completions, chat"),
        (["--prompts", "pictures"], "ids, text"),
        (["--rate", "0"], "--rate"),
        (["--rate", "1,x"], "--rate"),
        (["--input", "x"], "--input"),
        (["--url", "localhost"], "--url"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9", "--model", "m", *words])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)


def test_the_command_says_that_nobody_listens() -> None:
    with socket.socket() as taken:  # nobody else can listen there meanwhile
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--model", "m", "--concurrency", "1"])
    assert isinstance(done.exception, UserError)
    assert "every request of the warm-up failed: connection" in str(done.exception)


@loops
async def test_the_command_runs_in_whatever_loop_is_installed(shared: Site, tmp_path: Path) -> None:
    """uvloop, here: its transports are not asyncio's."""
    arguments = ["bench", "serve", "--url", shared.url, "--api-key", token("alpha"), "--concurrency", "2"]
    arguments += [
        "--requests",
        "4",
        "--input",
        "8",
        "--output",
        "3",
        "--vocab",
        "256",
        "--json",
        str(tmp_path / "r.json"),
    ]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    [run] = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert run["output_tokens"] == 12
