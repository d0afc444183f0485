"""The running gateway: starts, is or is not ready, reloads, drains, stops.

Rules
- ``start`` returns soon: policies are started, the slow parts (model files, workers) go on in the background.
  ``/healthz`` is 200 from the first moment, ``/readyz`` once every model has its tokenizer and a ready worker.
- ``drain``: not ready at once, new requests get 503, running and queued ones go on for at most ``drain_s``; the rest
  then ends with 503, or an error event where it streams. Every reservation is settled before it returns.
- ``reload`` reads the file again. A mistake in it changes nothing; what needs a restart is named, not half-done
  (``reloading.py``). It is the truth for all it names: what the admin API changed meanwhile goes back to what it says.
- ``stop`` ends children and background work, also after a failed start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gateway import log
from gateway.config_file import load
from gateway.device_time import DeviceBook
from gateway.dispatch import Dispatcher
from gateway.gatekeeper import Gatekeeper
from gateway.history import History
from gateway.intake import Intake
from gateway.metrics import Metrics
from gateway.models import ModelHandle, Models, load_model
from gateway.pipeline import Pipeline
from gateway.pool import Pool
from gateway.public_prefixes import PublicPrefixes
from gateway.purge import Purger
from gateway.recent import RecentRequests
from gateway.reloading import Reloaded, compare, in_force
from gateway.report import Reporter
from gateway.retention import sweep_outdated
from gateway.runtime import Runtime
from gateway.settings import PolicyUse, Settings
from gateway.state.audit import Actor, Event
from gateway.state.overlay import Combiner
from gateway.state.registrar import Registrar
from gateway.telemetry import Telemetry
from gateway.tenants import Tenants
from gateway.tls import Certificates
from policies.registry import Registry
from policies.spi import KINDS, Kind
from workers.model_store import Progress

_log = log.get("gateway")

SIGNAL = Actor("signal", "signal")
FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 30.0
_LAST_WORDS_S = 2.0
"""How long requests that were cut off by the end of a drain may take to tell their callers."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What ``compose.build`` made."""

    registry: Registry
    runtime: Runtime
    tenants: Tenants
    purger: Purger
    public_prefixes: PublicPrefixes
    models: Models
    intake: Intake
    gatekeeper: Gatekeeper
    pipeline: Pipeline
    reporter: Reporter
    dispatchers: Mapping[str, Dispatcher]
    pools: Sequence[Pool]
    metrics: Metrics
    telemetry: Telemetry
    recent: RecentRequests
    devices: DeviceBook
    history: History
    registrar: Registrar
    certificates: Certificates
    secret: bytes = field(repr=False)
    """Signs receipts; never shown."""


class Gateway:
    """One gateway process without its listeners."""

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        *,
        base_dir: Path,
        config_path: Path | None = None,
        env: Mapping[str, str],
    ) -> None:
        self.settings = settings
        self.parts = parts
        self.env = env
        self.progress: Progress | None = None
        """Told, from a thread, how far fetching and unpacking of model files is. Set before ``start``."""
        self._base_dir = base_dir
        self._config_path = config_path
        self._tasks: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()
        self._combiner = Combiner()
        self._started = False
        self._draining = False

    @property
    def draining(self) -> bool:
        """Whether it takes no new requests."""
        return self._draining

    @property
    def missing(self) -> list[str]:
        """What keeps it from being ready, for the operator."""
        if self._draining:
            return ["draining"]
        if not self._started:
            return ["starting"]
        missing = []
        for name, dispatcher in self.parts.dispatchers.items():
            if not dispatcher.model.loaded:
                missing.append(f"model {name}: its files are not loaded")
            if not dispatcher.ready:
                missing.append(f"model {name}: no worker is ready")
        return missing

    @property
    def ready(self) -> bool:
        """Whether every model can be used."""
        return not self.missing

    async def start(self) -> None:
        """Begin. Raises what a policy raises that cannot start."""
        self.parts.registrar.start(self.renew_tenants)
        self.renew_tenants()
        await self.parts.runtime.start()
        self._spawn("loop lag", self.parts.metrics.watch_loop())
        self._spawn("history", self.parts.history.run())
        self._spawn("device time", self.parts.devices.run())
        self._spawn("certificates", self.parts.certificates.watch())
        self._spawn("retention", sweep_outdated(self.parts.tenants, self.parts.purger))
        for model in self.parts.models:
            self._spawn(f"load {model.name}", self._load(model))
        for pool in self.parts.pools:
            pool.start()
        self._started = True

    def renew_tenants(self) -> None:
        """Put the file's tenants and those of the admin API in force, for requests that arrive from now on."""
        settings, problems = self._combiner.combined(self.settings, self.parts.registrar.tenants)
        for problem in problems:
            _log.error("stored_tenant_left_out", why=problem)
        self.parts.tenants.reload(settings)
        self.parts.metrics.configure(settings)

    async def reload(self, actor: Actor = SIGNAL) -> Reloaded:
        """Read the configuration file again. Raises ConfigErrors, PolicyConfigError …; nothing has changed then."""
        if self._config_path is None:
            raise ValueError("this gateway was not started from a file")
        async with self._reloading:
            loaded = await asyncio.to_thread(load, self._config_path)
            loaded.verify(self.parts.registry)
            settings = loaded.settings
            done = compare(self.settings, settings)
            current = self.parts.runtime.current
            wanted: dict[Kind, PolicyUse] = {kind: getattr(settings.policies, kind) for kind in KINDS}
            changes = {kind: use for kind, use in wanted.items() if use != current.uses[kind]}
            if current.fallbacks:  # it failed, and the operator has done something about it
                changes["scheduling"] = wanted["scheduling"]
            if changes:
                await self.parts.runtime.swap(changes)
            others = [path for path in done.changed if not path.startswith("policies.")]
            done = replace(done, changed=(*(f"policies.{kind}" for kind in changes), *others))
            self._apply(in_force(self.settings, settings))
            await self.parts.certificates.renew()
        _log.info("reloaded", changed=len(done.changed), policies=sorted(changes), tenants=len(settings.tenants))
        await self.parts.registrar.record(Event(actor, "config.reload", "config", after=done.as_json()))
        if done.needs_restart:
            _log.warning("reload_needs_restart", keys=", ".join(done.needs_restart))
        return done

    def _apply(self, settings: Settings) -> None:
        """What can change while requests run, but for the policies: for requests that arrive from now on."""
        self.settings = settings
        self.renew_tenants()
        self.parts.pipeline.retime(settings.timeouts)
        self.parts.pipeline.delivery.streams = settings.streams
        self.parts.reporter.log_ratio = settings.log.sample_ratio
        self.parts.pipeline.replays.settings = settings.idempotency
        self.parts.gatekeeper.budget_s = settings.timeouts.policy_s
        for dispatcher in self.parts.dispatchers.values():
            dispatcher.cap(settings.queue)

    async def drain(self) -> None:
        """Take nothing new, let what runs end, cut off the rest."""
        self._draining = True
        pipeline = self.parts.pipeline
        for dispatcher in self.parts.dispatchers.values():
            dispatcher.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.timeouts.drain_s):
                await pipeline.wait_idle()
        for dispatcher in self.parts.dispatchers.values():
            dispatcher.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await pipeline.wait_idle()
        _log.info("drained", cut_off=pipeline.active)

    async def stop(self) -> None:
        """End everything. Idempotent."""
        self._draining = True
        for dispatcher in self.parts.dispatchers.values():
            dispatcher.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.parts.models.adapters.close()
        await asyncio.gather(*(pool.stop() for pool in self.parts.pools))
        await self.parts.pipeline.settler.wait()
        if self._started:
            await self.parts.devices.flush()
        await self.parts.runtime.close()
        await self.parts.registrar.stop()
        await self.parts.intake.close()
        await asyncio.to_thread(self.parts.telemetry.shutdown)

    def workers(self) -> list[dict[str, Any]]:
        """Every worker, for ``/admin/workers``."""
        return [worker for pool in self.parts.pools for worker in pool.snapshot()]

    async def _load(self, model: ModelHandle) -> None:
        """Read the model's files, again and again until that works: they may still be on their way."""
        wait_s = FIRST_RETRY_S
        while True:
            try:
                await load_model(model, self._base_dir, self.progress)
            except Exception as error:  # files of any kind of malformed: whatever they provoke, they may be mended
                # The operator's own configuration, not a caller's text: the message is safe and needed.
                why = str(error) if isinstance(error, OSError | ValueError) else log.describe(error)
                _log.error("model_not_loaded", model=model.name, why=why, retry_s=wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(_MAX_RETRY_S, wait_s * 2)
            else:
                _log.info("model_loaded", model=model.name, revision=model.revision)
                return

    def _spawn(self, name: str, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))
