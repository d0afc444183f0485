"""What ``bench gateway`` measures: a gateway, a stub worker that answers at once and a collector, a process each.

Rules
- Nothing is left out: a verified JWT, limits that are counted and never bind, a fair queue, traces.
- The stub is ``workers.testing``: the real stream and the real engine around a runner that echoes the prompt. The
  collector takes spans and throws them away.
- Whatever was started ends with the stage, also when a measurement fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gateway.bench.load import poisson
from gateway.bench.online import run_loop
from gateway.bench.report import BenchError
from workers.config import EngineConfig
from workers.launchers.base import WorkerSpec
from workers.launchers.local import spec_line
from workers.protocol import Generate, StepOutputs, Up
from workers.rpc.client import WorkerClient

MODEL = "stub"
RATE = 100.0
"""Requests per second at which the added time is measured."""
INPUT = 32
"""Prompt tokens of a small request."""
TENANTS = {"search": 4, "assist": 2, "batch": 1}
ENGINE = {"blocks": 32_768, "max_running": 4096, "max_step_tokens": 8192, "max_context": 131_072}
DIRECT_REQUESTS = 300
_START_S = 60.0
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class Stage:
    """Where everything is."""

    url: str
    admin_url: str
    tokens: dict[str, str]
    """A token per tenant."""
    direct_ms: float
    """A one-token request straight to the stub, before the gateway took it, at ``RATE``: the median of a few hundred; 0
    for a stub that pauses."""
    pid: int
    """The gateway's process."""

    def cpu_s(self) -> float | None:
        """Seconds of processor time that the gateway has used, threads and kernel included; None: not told here."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def staged(source: str, *, sample_ratio: float, step_s: float = 0.0) -> Iterator[Stage]:
    """Start all three. ``source``: whose tokenizer. ``step_s``: the stub's pause per step. Raises BenchError."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-")))
        key, secret = secrets.token_urlsafe(48), secrets.token_urlsafe(32)
        address = f"unix:{folder / 'w.sock'}"
        sink = stack.enter_context(process(folder, "collector", [sys.executable, "-m", "gateway.bench.collector_sink"]))
        port = wait_for(lambda: _first_line(folder / "collector.out"), sink, folder, "collector")
        worker = stack.enter_context(
            process(folder, "worker", [sys.executable, "-m", "workers.testing", f"--step-s={step_s}"], pipe=True)
        )
        assert worker.stdin is not None
        spec = WorkerSpec("stub-0", 0, MODEL, source, EngineConfig.model_validate(ENGINE))
        worker.stdin.write(spec_line(spec, address, secret, os.getpid()))
        worker.stdin.flush()
        wait_for(lambda: "there" if (folder / "w.sock").exists() else "", worker, folder, "worker")
        direct_ms = run_loop(_direct(address, secret)) if not step_s else 0.0
        config = folder / "gateway.yaml"
        config.write_text(json.dumps(_config(source, address, f"http://127.0.0.1:{port}", sample_ratio)))
        ready = folder / "ready.json"
        command = [sys.executable, "-m", "gateway.cli", "serve", str(config), "--ready-file", str(ready)]
        gateway = stack.enter_context(
            process(folder, "gateway", command, {"FOREBAY_JWT_KEY": key, "FOREBAY_BENCH_SECRET": secret})
        )
        info = json.loads(wait_for(lambda: ready.read_text() if ready.exists() else "", gateway, folder, "gateway"))
        wait_for(lambda: "ready" if is_ready(info["url"]) else "", gateway, folder, "gateway")
        yield Stage(info["url"], info["admin_url"], tenant_tokens(key), direct_ms, gateway.pid)


@contextlib.contextmanager
def echoing() -> Iterator[str]:
    """Start the bare echo that the gateway is held against; its URL. Raises BenchError."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-")))
        echo = stack.enter_context(process(folder, "echo", [sys.executable, "-m", "gateway.bench.echo_server"]))
        yield f"http://127.0.0.1:{wait_for(lambda: _first_line(folder / 'echo.out'), echo, folder, 'echo')}"


async def _direct(address: str, secret: str) -> float:
    """They come as they will come to the gateway: a core that has slept between two takes twice as long for each."""
    client, took = WorkerClient(address, secret), list[float]()
    waiting: dict[str, asyncio.Future[float]] = {}

    def heard(message: Up) -> None:
        arrived = time.perf_counter()
        for output in message.outputs if isinstance(message, StepOutputs) else ():
            if output.finish:
                waiting.pop(output.id).set_result(arrived)

    async def ask(name: str) -> None:
        ended = waiting[name] = asyncio.get_running_loop().create_future()
        request = Generate(name, list(range(1, INPUT + 1)), 1)
        began = time.perf_counter()
        client.send(request)
        took.append(await ended - began)

    try:
        await client.connect(_START_S)
        reader = asyncio.create_task(client.listen(heard))
        start = time.perf_counter()
        async with asyncio.timeout(_START_S), asyncio.TaskGroup() as group:
            for index, due in enumerate(poisson(RATE, DIRECT_REQUESTS, "direct")):
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                group.create_task(ask(f"direct-{index}"))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    finally:
        await client.close()
    return round(median(took[DIRECT_REQUESTS // 10 :]) * 1e3, 3)


def _config(source: str, address: str, collector: str, sample_ratio: float) -> dict[str, Any]:
    limits = {"requests_per_minute": _NO_LIMIT, "tokens_per_minute": _NO_LIMIT, "concurrent": 8192}
    launch = {"use": "static", "addresses": [address], "secret_env": "FOREBAY_BENCH_SECRET"}
    bounded = {"max_queued": 8192, "max_queued_per_tenant": 8192}
    jwt = {"algorithms": ["HS256"], "audience": "forebay", "issuer": "bench", "key_env": "FOREBAY_JWT_KEY"}
    return {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "policies": {"auth": {"use": "jwt", "with": jwt}, "admission": {"use": "bounded", "with": bounded}},
        "classes": {"interactive": {"priority": 1, "max_wait_s": 600}},
        "tenants": [{"id": name, "weight": weight, "limits": limits} for name, weight in TENANTS.items()],
        "models": [
            {"name": MODEL, "source": source, "pools": [{"name": "stub", "launch": launch, "engine": dict(ENGINE)}]}
        ],
        "telemetry": {"otlp_endpoint": collector, "otlp_protocol": "http/protobuf", "sample_ratio": sample_ratio},
    }


def tenant_tokens(key: str) -> dict[str, str]:
    """A signed token for each of ``TENANTS``, good for an hour."""
    import jwt

    now = int(time.time())
    return {
        tenant: jwt.encode(
            {"iss": "bench", "aud": "forebay", "sub": tenant, "tenant": tenant, "iat": now, "exp": now + 3600},
            key,
            algorithm="HS256",
        )
        for tenant in TENANTS
    }


@contextlib.contextmanager
def process(
    folder: Path, name: str, command: list[str], env: dict[str, str] | None = None, *, pipe: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """One of our modules, ended afterwards; what it says is in ``folder``."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "FOREBAY_"))}
    cache = {key: value for key, value in os.environ.items() if key == "FOREBAY_CACHE"}
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(  # noqa: S603 - our own modules
            command,
            stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**clean, **cache, **(env or {})},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def wait_for(ask: Callable[[], str], process: subprocess.Popen[bytes], folder: Path, name: str) -> str:
    """The first answer that is not empty. Raises BenchError with the process's last words when it ends before."""
    deadline = time.monotonic() + _START_S
    while not (answer := ask()):
        if process.poll() is not None or time.monotonic() > deadline:
            last = "\n".join((folder / f"{name}.err").read_text(errors="replace").splitlines()[-8:])
            raise BenchError(f"the {name} did not start:\n{last}")
        time.sleep(0.05)
    return answer


def _first_line(path: Path) -> str:
    text = path.read_text()
    return text.partition("\n")[0] if "\n" in text else ""


def is_ready(url: str) -> bool:
    """Whether a gateway takes requests."""
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(f"{url}/readyz", timeout=5) as answer:  # noqa: S310 - our own gateway
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
