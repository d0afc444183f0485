"""The real worker process with a real (tiny) model: starts, serves, drains, and says what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.workers import tiny_model
from workers.config import EngineConfig
from workers.launchers.base import LaunchContext, WorkerProcess, WorkerSpec
from workers.launchers.local import LocalLauncher
from workers.main import main
from workers.protocol import Drain, Generate, Hello, SamplingParams, StepOutputs
from workers.rpc import SessionError, WorkerClient
from workers.rpc.heard import Heard

pytestmark = pytest.mark.timeout(120)
ENGINE = EngineConfig(device="cpu", dtype="float32", blocks=40, max_running=4, threads=1)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SECRET = "a secret of some length"
PARTS = ("weights", "kv", "activations", "buffers", "margin", "left")


class Log:
    """Lines of a worker's log, parsed."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.news = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        if line.startswith("{"):
            self.events.append(json.loads(line))
            self.news.set()

    async def event(self, name: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                found = [event for event in self.events if event["event"] == name]
                if found:
                    return found[0]
                self.news.clear()
                await self.news.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def start(model: Path) -> AsyncIterator[Callable[..., Any]]:
    workers: list[WorkerProcess] = []

    async def launch(source: str = "tiny", engine: EngineConfig = ENGINE, **changes: Any) -> tuple[WorkerProcess, Log]:
        log = Log()
        env = {"FOREBAY_CACHE": str(model.parent / "cache")}
        spec = WorkerSpec("m/p-0", 0, "m", source, engine, base_dir=str(model.parent), env=env)
        worker = await LocalLauncher(LaunchContext(log=log), **changes).start(spec)
        workers.append(worker)
        return worker, log

    yield launch
    for worker in workers:
        await worker.stop(0)


def scraped(port: int, name: str) -> list[Sample]:
    """The worker's samples of one metric."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [sample for family in families for sample in family.samples if sample.name == name]


def build_info(port: int) -> dict[str, str]:
    """The labels of the worker's ``forebay_build_info``."""
    (found,) = scraped(port, "forebay_build_info")
    return dict(found.labels)


async def outputs(messages: AsyncIterator[Any], request_id: str) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(60):
        async for message in messages:
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    if output.id == request_id:
                        tokens += output.tokens
                        if output.finish:
                            assert output.finish == "length"
                            return tokens
    raise AssertionError("the stream ended first")


async def test_it_loads_serves_and_drains_on_request(start: Callable[..., Any]) -> None:
    worker, log = await start()
    client = WorkerClient(worker.address, worker.secret)
    await client.connect()
    messages = Heard(client)
    hello = await asyncio.wait_for(anext(messages), 60)
    assert isinstance(hello, Hello)
    assert (hello.worker, hello.model, hello.pid, hello.device, hello.dtype) == (
        "m/p-0",
        "m",
        worker.pid,
        "cpu",
        "float32",
    )
    assert (hello.block_size, hello.blocks, hello.max_running, hello.max_context) == (16, 40, 4, tiny_model.CONTEXT)
    per_token = 2 * 1 * tiny_model.KV_HEADS * tiny_model.HEAD_DIM * 4
    assert hello.kv_bytes_per_token == per_token
    assert hello.model_revision.startswith("sha256:")
    assert {"python", "torch", "attention", "kv_dtype", "weight_dtype"} <= hello.versions.keys()
    assert await asyncio.to_thread(build_info, hello.metrics_port) == {
        **hello.versions,
        "model_revision": hello.model_revision,
        "tokenizer_sha256": hello.tokenizer_sha256,
        "device": "cpu",
        "dtype": "float32",
    }
    assert len(hello.tokenizer_sha256) == 64

    loaded = await log.event("model_loaded")
    assert loaded["weight_bytes"] == hello.weight_bytes > tiny_model.VOCAB * tiny_model.HIDDEN * 4
    assert loaded["kv_bytes"] == 640 * per_token
    assert loaded["frozen_objects"] > 50_000, "torch's, at least"
    assert (loaded["blocks"], loaded["cache_tokens"], loaded["requests_of_mean_length"]) == (40, 640, 1)
    planned = await log.event("memory_budget")
    assert planned["kv"] == loaded["kv_bytes"]
    assert planned["free"] == sum(planned[part] for part in PARTS)
    assert (await log.event("worker_host"))["allocator"] in ("system", "tcmalloc", "jemalloc", "mimalloc")

    client.send(Generate("a", [3, 4, 5], 12, GREEDY))
    first = await outputs(messages, "a")
    client.send(Generate("b", [3, 4, 5], 12, GREEDY))
    client.send(Drain())
    assert await outputs(messages, "b") == first
    assert len(first) == 12
    async with asyncio.timeout(30):
        async for _ in messages:  # until the stream ends, in good order
            pass
    assert (await asyncio.wait_for(worker.wait(), 30)).exit_code == 0
    await client.close()


async def test_a_cache_in_bytes_holds_more_and_says_so(start: Callable[..., Any]) -> None:
    engine = ENGINE.model_copy(update={"blocks": None, "kv_cache": 2**20, "kv_dtype": "int8"})
    worker, log = await start(engine=engine)
    client = WorkerClient(worker.address, worker.secret)
    await client.connect()
    messages = Heard(client)
    hello = await asyncio.wait_for(anext(messages), 60)
    per_token = 2 * 1 * tiny_model.KV_HEADS * (tiny_model.HEAD_DIM + 2)
    assert (hello.kv_bytes_per_token, hello.blocks) == (per_token, 2**20 // (16 * per_token))
    assert hello.versions["kv_dtype"] == "int8"
    (sample,) = await asyncio.to_thread(scraped, hello.metrics_port, "forebay_engine_kv_bytes_per_token")
    assert sample.value == per_token
    assert (await log.event("model_loaded"))["kv_dtype"] == "int8"
    client.send(Generate("a", [3, 4, 5], 12, GREEDY))
    assert len(await outputs(messages, "a")) == 12
    await client.close()


async def test_by_hand_over_tcp_it_finishes_what_runs_when_told_to_end(model: Path) -> None:
    engine = ENGINE.model_copy(update={"blocks": None, "kv_cache": 2**20})
    argv = ["--source", str(model), "--listen", "127.0.0.1:0", "--engine", engine.model_dump_json(), "--drain-s", "60"]
    env = {**os.environ, "FOREBAY_WORKER_SECRET": SECRET, "FOREBAY_CACHE": str(model.parent / "cache")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.main", *argv), env=env, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stderr is not None
    address = json.loads(await asyncio.wait_for(process.stderr.readline(), 60))["address"]
    with pytest.raises(SessionError):
        await WorkerClient(address, "not the secret").connect()
    client = WorkerClient(address, SECRET)
    await client.connect()
    messages = Heard(client)
    assert isinstance(await asyncio.wait_for(anext(messages), 60), Hello)
    client.send(Generate("long", [3, 4, 5], 400, GREEDY))
    while not isinstance(await asyncio.wait_for(anext(messages), 60), StepOutputs):
        pass
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        total = 0
        async for message in messages:
            if isinstance(message, StepOutputs):
                total = max([total, *(output.output_tokens for output in message.outputs)])
    assert total == 400
    assert await asyncio.wait_for(process.wait(), 30) == 0
    await client.close()


async def test_a_stop_while_it_loads_ends_it_at_once(start: Callable[..., Any]) -> None:
    worker, log = await start()
    await log.event("worker_listening")
    await worker.stop(20)
    assert (await worker.wait()).exit_code == 0


async def test_a_model_that_is_not_there_is_named(start: Callable[..., Any]) -> None:
    worker, log = await start("no-such-model")
    assert (await asyncio.wait_for(worker.wait(), 60)).exit_code == 1
    failed = await log.event("worker_start_failed")
    assert "no-such-model" in failed["detail"]
    assert "no-such-model" in (await worker.wait()).last_words


def test_a_log_level_that_is_none_is_told_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_LOG_LEVEL", "loud")
    assert main(["--source", "nowhere", "--listen", "unix:/nonexistent/w.sock"]) == 2
    error = capsys.readouterr().err
    assert "FOREBAY_LOG_LEVEL" in error
    assert "'loud'" in error
    assert "debug, info, warning or error" in error


def test_wrong_options_are_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen", "127.0.0.1:0"]) == 2
    assert "--source is missing" in capsys.readouterr().err
