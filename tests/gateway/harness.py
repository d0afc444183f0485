"""A whole gateway inside the test's event loop: real listeners and policies, echo workers in their own processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jwt
import openai

from gateway.app import admin_app, public_app
from gateway.compose import build
from gateway.dispatch import Dispatcher
from gateway.pool import WorkerState
from gateway.service import Gateway
from gateway.settings import Settings
from policies.manager import make_manager, register
from policies.spi import LauncherSpec, PolicySpec, hookimpl
from policies.types import JobId, Usage
from tests.forked import ForkedLauncher
from tests.gateway.http.serving import serving
from tests.gateway.tiny_tokenizer import write_tokenizer
from workers.launchers.base import LaunchContext, Launcher
from workers.testing import Echo

KEY = "a key of the gateway's own tests, at least 32 bytes"
MODEL = "echo"
AUTH = {
    "use": "jwt",
    "with": {"algorithms": ["HS256"], "audience": "forebay", "issuer": "dev", "key_env": "FOREBAY_JWT_KEY"},
}
BASE: Mapping[str, Any] = {
    "listen": {"port": 0},
    "admin": {"port": 0},
    "policies": {"auth": AUTH, "quota": {"use": "token_bucket"}, "scheduling": {"use": "fcfs"}},
    "classes": {"interactive": {"priority": 1, "max_wait_s": 30}, "batch": {"priority": 0, "max_wait_s": 60}},
    "tenants": [{"id": "alpha"}, {"id": "beta"}],
    "models": [
        {
            "name": MODEL,
            "source": "model",
            "pools": [{"name": "local", "launch": {"use": "echo"}, "engine": {"blocks": 256, "max_running": 8}}],
        }
    ],
    "timeouts": {"drain_s": 5},
}


def token(tenant: str, **claims: Any) -> str:
    """A valid credential of ``tenant``."""
    now = int(time.time())
    return jwt.encode({"tenant": tenant, "aud": "forebay", "iss": "dev", "exp": now + 600, **claims}, KEY, "HS256")


def make_launcher(context: LaunchContext) -> Launcher:
    """The launcher ``echo``: its workers behave as the environment's ``ECHO`` says."""
    return ForkedLauncher(context, Echo(**json.loads(context.env["ECHO"])))


class EchoPlugin:
    """Registers the launcher and whatever policies a test brings."""

    def __init__(self, policies: Sequence[PolicySpec] = ()) -> None:
        self._policies = list(policies)

    @hookimpl
    def forebay_launchers(self) -> list[LauncherSpec]:
        return [LauncherSpec("echo", "tests.gateway.harness:make_launcher", "Echo workers.")]

    @hookimpl
    def forebay_policies(self) -> list[PolicySpec]:
        return self._policies


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``: mappings merged, policies and everything else replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        merge = isinstance(old, Mapping) and isinstance(value, Mapping) and "use" not in value
        result[key] = merged(old, value) if merge else value  # type: ignore[arg-type]
    return result


def pool(count: int = 1, **engine: Any) -> dict[str, Any]:
    """The ``models`` entry with other engine settings."""
    engine = {"blocks": 256, "max_running": 8, **engine}
    return {
        "name": MODEL,
        "source": "model",
        "pools": [{"name": "local", "launch": {"use": "echo", "count": count}, "engine": engine}],
    }


def write_model(folder: Path, context: int = 4096) -> None:
    """A model directory that the gateway can read; no worker here loads its weights."""
    folder.mkdir(exist_ok=True, parents=True)
    write_tokenizer(folder, context)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


@dataclass(slots=True)
class Site:
    """A running gateway."""

    gateway: Gateway
    url: str
    admin_url: str
    http: httpx.AsyncClient
    admin: httpx.AsyncClient
    _clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    @property
    def dispatcher(self) -> Dispatcher:
        return self.gateway.parts.dispatchers[MODEL]

    def client(self, tenant: str = "alpha", **options: Any) -> openai.AsyncOpenAI:
        """The official client."""
        options = {"max_retries": 0, **options}
        made = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=token(tenant), **options)
        self._clients.append(made)
        return made

    async def complete(self, caller: str = "alpha", /, **body: Any) -> httpx.Response:
        """``POST /v1/completions`` with token ids as prompt."""
        headers = body.pop("headers", {})
        body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 8, **body}
        return await self.http.post(
            "/v1/completions", json=body, headers={"authorization": f"Bearer {token(caller)}", **headers}
        )

    @contextlib.asynccontextmanager
    async def stream(self, caller: str = "alpha", /, **body: Any) -> AsyncIterator[httpx.Response]:
        """The same as a stream, open until the block ends."""
        body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 8, "stream": True, **body}
        headers = {"authorization": f"Bearer {token(caller)}"}
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            yield response

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples whose line begins with ``name``."""
        lines = (await self.admin.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def slots(self, tenant: str) -> int:
        """Concurrency slots that ``tenant`` holds."""
        return int(self.gateway.parts.runtime.current.quota.concurrent(tenant))  # type: ignore[attr-defined]

    async def at_rest(self, timeout_s: float = 30.0) -> None:
        """Wait until nothing is left of any request: no job, no block in use, no slot."""

        def rest() -> bool:
            stats = [handle.stats for handle in self.dispatcher.workers]
            return (
                self.gateway.parts.pipeline.active == 0
                and len(self.dispatcher.queue) == 0
                and self.dispatcher.queue.running == 0
                and self.dispatcher.in_flight == 0
                and all(not s.used_blocks and not s.running and not s.waiting for s in stats)
                and not self.gateway.parts.runtime.current.quota.dump().get("reservations")
            )

        await until(rest, "the gateway is at rest", timeout_s)
        for handle in self.dispatcher.workers:
            assert handle.hello is not None
            assert handle.stats.free_blocks + handle.stats.cached_blocks == handle.hello.blocks


class Settlements:
    """What was settled, with whose figures; the real policy does the work."""

    def __init__(self, site: Site) -> None:
        self.usages: list[Usage] = []
        self._quota = quota = site.gateway.parts.runtime.current.quota
        settle = quota.settle

        async def counted(job_id: JobId, usage: Usage, now: float) -> Any:
            self.usages.append(usage)
            return await settle(job_id, usage, now)

        self._settle = settle
        quota.settle = counted  # type: ignore[method-assign]

    def close(self) -> None:
        """Stop counting."""
        self._quota.settle = self._settle  # type: ignore[method-assign]


@contextlib.contextmanager
def held(dispatcher: Dispatcher) -> Iterator[None]:
    """Nothing is dispatched meanwhile: whatever comes is queued, however fast its workers are."""
    for handle in dispatcher.workers:
        handle.state = WorkerState.DRAINING
    try:
        yield
    finally:
        for handle in dispatcher.workers:
            handle.state = WorkerState.READY
        dispatcher.wake()


def tickets(site: Site) -> list[Any]:
    """The open requests of the model."""
    return list(site.dispatcher._desk.tickets.values())


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """The first truthy answer of ``condition``; AssertionError that names ``what`` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)
    return answer


def events(text: str) -> list[Any]:
    """The events of an SSE body: parsed JSON, or ``"[DONE]"``."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    echo: Echo | None = None,
    policies: Sequence[PolicySpec] = (),
    plugins: Sequence[object] = (),
    env: Mapping[str, str] | None = None,
    ready: bool = True,
    config_path: Path | None = None,
) -> AsyncIterator[Site]:
    """A gateway as ``BASE`` with ``changes`` says, with its listeners; ready unless told otherwise."""
    write_model(folder / "model")
    settings = Settings.model_validate(merged(BASE, changes or {}))
    manager = make_manager(settings.plugins)
    register(manager, EchoPlugin(policies), "echo")
    for number, plugin in enumerate(plugins):
        register(manager, plugin, f"plugin-{number}")
    environment = {"FOREBAY_JWT_KEY": KEY, "ECHO": json.dumps(asdict(echo or Echo())), **(env or {})}
    gateway = build(settings, base_dir=folder, env=environment, manager=manager, config_path=config_path)
    try:
        async with (
            serving(public_app(gateway)) as port,
            serving(admin_app(gateway)) as admin_port,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}",
                timeout=30,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            ) as http,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=30) as admin,
        ):
            await gateway.start()
            site = Site(gateway, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", http, admin)
            try:
                if ready:
                    await until(lambda: gateway.ready, "ready")
                yield site
            finally:
                for client in site._clients:
                    await client.close()
                for dispatcher in gateway.parts.dispatchers.values():
                    dispatcher.abort()
    finally:
        await gateway.stop()
