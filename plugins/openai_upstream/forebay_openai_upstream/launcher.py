"""Starts workers that are servers of somebody else: per worker one private socket of ours, inside this process.

The gateway then talks to it as to any worker: same stream, same secret, same rules for losing and replacing it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forebay_openai_upstream.config import UpstreamConfig
from forebay_openai_upstream.worker import Upstream


class Context(Protocol):
    """What is needed of the context that a launcher gets."""

    @property
    def config(self) -> object:
        """The validated ``with:`` block."""
        ...

    @property
    def env(self) -> Mapping[str, str]:
        """The environment: keys are there."""
        ...

    @property
    def log(self) -> Callable[[str, str], None] | None:
        """Takes (worker, line)."""
        ...


class Spec(Protocol):
    """What is needed of a worker's spec."""

    @property
    def name(self) -> str:
        """The worker's name."""
        ...

    @property
    def model(self) -> str:
        """What clients ask for."""
        ...


class UpstreamLauncher:
    """One per pool."""

    def __init__(self, context: Context) -> None:
        """Raises ValueError where the key or the certificates are missing."""
        assert isinstance(context.config, UpstreamConfig)
        self._config = config = context.config
        self._log = context.log
        self._key = context.env.get(config.api_key_env) if config.api_key_env else None
        if config.api_key_env and not self._key:
            raise ValueError(f"launch.with.api_key_env: the variable {config.api_key_env} is not set")
        if self._key and not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            raise ValueError(f"launch.with.api_key_env: {config.api_key_env} holds no key: one printable ASCII word")
        if config.ca_file and not Path(config.ca_file).is_file():
            raise ValueError(f"launch.with.ca_file: there is no file {config.ca_file!r}")

    async def start(self, spec: Spec) -> UpstreamWorker:
        """Open the socket; the server is asked in the background. Raises OSError."""
        folder = Path(tempfile.mkdtemp(prefix="forebay-upstream-"))
        secret = secrets.token_urlsafe(32)

        def log(event: str, **fields: Any) -> None:
            if self._log is not None:
                self._log(spec.name, json.dumps({"event": event, "level": "warning", "worker": spec.name, **fields}))

        try:
            upstream = Upstream(
                f"unix:{folder}/w.sock",
                secret=secret,
                name=spec.name,
                model=spec.model,
                config=self._config,
                key=self._key,
                log=log,
            )
            await upstream.start()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return UpstreamWorker(f"unix:{folder}/w.sock", secret, upstream, folder)


@dataclass(slots=True)
class UpstreamWorker:
    """A ``WorkerProcess`` without a process."""

    address: str
    secret: str
    upstream: Upstream
    folder: Path
    pid: int | None = None

    async def wait(self) -> Any:
        """Never returns: the server's life is not ours to watch."""
        await asyncio.get_running_loop().create_future()

    async def stop(self, grace_s: float) -> None:
        """End our side of it; the server itself goes on."""
        await self.upstream.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
