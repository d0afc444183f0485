"""The composition root: settings in, a gateway out. Nothing else makes its parts, nothing here decides anything.

settings → plugins → registry → policies (with stopwatches) → models → queues and dispatchers → pools → pipeline
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import pluggy

from gateway import log
from gateway.adapters import Adapters
from gateway.arriving import Arriving
from gateway.config_file import SOURCELESS
from gateway.delivery import Delivery
from gateway.device_time import DeviceBook
from gateway.dispatch import Dispatcher
from gateway.entrance import Entrance
from gateway.epochs import FILE as EPOCHS
from gateway.epochs import Epochs
from gateway.fetch import fetch_json
from gateway.gatekeeper import Gatekeeper
from gateway.gauge_sources import model_gauges, quota_gauges, worker_gauges
from gateway.history import History
from gateway.http.operators import Operators
from gateway.intake import Intake
from gateway.log import LEVEL_ENV
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.monitor import LiveMonitor
from gateway.pipeline import Pipeline
from gateway.placement import with_labels
from gateway.pool import Pool
from gateway.public_prefixes import FILE as PUBLIC_PREFIXES
from gateway.public_prefixes import PublicPrefixes
from gateway.purge import Purger
from gateway.recent import RecentRequests
from gateway.refusals import Refusals
from gateway.replays import Replays
from gateway.report import Reporter
from gateway.request_log import RequestLog
from gateway.runtime import Runtime
from gateway.service import Gateway, Parts
from gateway.settings import Launch, Model, Settings
from gateway.settings import Pool as PoolConfig
from gateway.state.folder import folder
from gateway.state.records import KeyDirectory
from gateway.state.registrar import Registrar
from gateway.strangers import Strangers
from gateway.telemetry import Telemetry, setup
from gateway.tenants import Tenants
from gateway.timed import unwrap
from gateway.tls import Certificates, unencrypted
from gateway.versions import of_workers, own
from gateway.worker_slot import SlotOptions
from policies.manager import make_manager, tenant_from_claims
from policies.registry import Registry
from policies.spi import PolicyContext
from workers.launchers.base import LaunchContext, Launcher, LaunchError
from workers.rpc import TlsFiles

_log = log.get("compose")

SECRET_ENV = "FOREBAY_SERVER_SECRET"  # noqa: S105 - the variable's name
"""Keys the cache scopes. Replicas that share workers need the same; without it every start makes its own."""
_RETIRE_GRACE_S = 10.0


class BuildError(ValueError):
    """The gateway cannot be made as configured; the text names the YAML path and the remedy."""


def build(
    settings: Settings,
    *,
    base_dir: Path | str = ".",
    env: Mapping[str, str] = os.environ,
    config_path: Path | None = None,
    manager: pluggy.PluginManager | None = None,
) -> Gateway:
    """Make a gateway. Nothing is started; no file is read but policies' own and, with ``state.path``, the state.

    ``config_path``: what ``reload`` reads. ``manager``: plugins already loaded, instead of ``settings.plugins``.
    Raises BuildError, PluginError, RegistrationError.
    """
    base_dir = Path(base_dir).absolute()
    manager = manager or make_manager(settings.plugins)
    registry = Registry.from_manager(manager)
    secret = env.get(SECRET_ENV, "").encode() or secrets.token_bytes(32)
    keys = KeyDirectory()
    try:
        certificates = Certificates.of(settings, base_dir)
        state = folder(settings.state, base_dir)
        Operators.of(settings.admin, env)
        metrics = Metrics(settings, versions=own())
        telemetry = setup(settings, metrics, env=env, versions=own())
        runtime = Runtime(
            registry,
            PolicyContext(
                env=env,
                base_dir=str(base_dir),
                listen_host=settings.listen.host,
                tenant_from_claims=tenant_from_claims(manager),
                fetch_json=fetch_json,
                stored_keys=keys.find if state is not None else None,
                models=frozenset(model.name for model in settings.models),
                server_secret=secret,
                state_dir=str(state) if state is not None else None,
            ),
            settings.policies,
            timer=metrics.policy_timer,
            retire_after_s=settings.timeouts.total_s + _RETIRE_GRACE_S,
        )
        monitor = LiveMonitor(metrics, manager)
        devices = monitor.devices = DeviceBook(lambda: unwrap(runtime.current.quota))
        tenants = Tenants(settings, Epochs(state and state / EPOCHS))
        public_prefixes = PublicPrefixes(state and state / PUBLIC_PREFIXES)
        labelled = [with_labels(model, registry) for model in settings.models]
        adapters = Adapters(labelled)
        models = Models(labelled, adapters)
        dispatchers = {
            model.name: Dispatcher(
                models.handle(model.name),
                runtime.scheduler(model.name),
                settings.policies.scheduling.use,
                lambda: runtime.current.routing,
                monitor=monitor,
                caps=settings.queue,
                fallback=runtime.fallback,
                on_failover=partial(runtime.failed_over, model.name),
            )
            for model in settings.models
        }
        runtime.attach(dispatchers)
        pools = [
            _pool(model, config, dispatchers[model.name], adapters, registry, settings, telemetry, base_dir, env)
            for model in labelled
            for config in model.pools
        ]
        registrar = Registrar(state, keys, env)  # last: it opens files
    except ValueError as error:  # what policies, launchers and telemetry have against their settings
        raise BuildError(str(error)) from error
    intake = Intake(secret, public=public_prefixes)
    recent = RecentRequests(metrics.tenant)
    gatekeeper = Gatekeeper(
        budget_s=settings.timeouts.policy_s,
        monitor=monitor,
        clock=time.monotonic,
        strangers=Strangers(settings.listen.unauthenticated_per_minute),
    )
    refusals = Refusals(settings.listen.refused_per_minute)
    reporter = Reporter(
        telemetry,
        metrics,
        monitor,
        recent,
        refusals=refusals,
        request_log=_request_log(settings, base_dir),
        log_ratio=settings.log.sample_ratio,
    )
    pipeline = Pipeline(
        runtime=runtime,
        tenants=tenants,
        models=models,
        entrance=Entrance(
            models=models, tenants=tenants, intake=intake, gatekeeper=gatekeeper, dispatchers=dispatchers
        ),
        dispatchers=dispatchers,
        gatekeeper=gatekeeper,
        reporter=reporter,
        delivery=Delivery(reporter, settings.streams),
        intake=intake,
        replays=Replays(settings.idempotency, gatekeeper),
        monitor=monitor,
        timeouts=settings.timeouts,
        arriving=Arriving(settings.listen.max_body_bytes, refusals),
    )
    for dispatcher in dispatchers.values():
        metrics.add_source(model_gauges(dispatcher))
    metrics.add_source(worker_gauges(pools))
    metrics.add_workers(lambda: of_workers(hello for model in models for hello in model.hellos))
    metrics.add_source(quota_gauges(runtime, tenants, time.monotonic))
    parts = Parts(
        registry=registry,
        runtime=runtime,
        tenants=tenants,
        purger=Purger(tenants, pools, secret),
        public_prefixes=public_prefixes,
        models=models,
        intake=intake,
        gatekeeper=gatekeeper,
        pipeline=pipeline,
        reporter=reporter,
        dispatchers=dispatchers,
        pools=pools,
        metrics=metrics,
        telemetry=telemetry,
        recent=recent,
        devices=devices,
        history=History(metrics, tenants, dispatchers, recent),
        registrar=registrar,
        certificates=certificates,
        secret=secret,
    )
    return Gateway(settings, parts, base_dir=base_dir, config_path=config_path, env=env)


def _pool(
    model: Model,
    config: PoolConfig,
    dispatcher: Dispatcher,
    adapters: Adapters,
    registry: Registry,
    settings: Settings,
    telemetry: Telemetry,
    base_dir: Path,
    env: Mapping[str, str],
) -> Pool:
    handle = dispatcher.model
    spec = registry.launcher(config.launch.use)
    if model.source is None and not spec.upstream:
        raise BuildError(f"models: {model.name}: source {SOURCELESS.format(config.name)}")
    return Pool(
        model.name,
        model.source or "",
        config,
        _launcher(model.name, config, registry, env, base_dir),
        adapters.listening(dispatcher),
        options=SlotOptions(step_stall_s=settings.timeouts.step_stall_s),
        tokenizer_sha256=lambda: handle.files.tokenizer_sha256 if handle.files is not None else None,
        base_dir=str(base_dir),
        worker_env={LEVEL_ENV: env.get(LEVEL_ENV) or settings.log.level, **telemetry.worker_environment()},
        architectures={item.spec.architecture: item.spec.target for item in registry.models()},
    )


def _launcher(model: str, config: PoolConfig, registry: Registry, env: Mapping[str, str], base_dir: Path) -> Launcher:
    """Import what the launcher's spec names and call it with the pool's ``launch:`` block. Raises BuildError."""
    launch = config.launch
    for address in unencrypted(launch.addresses) if launch.tls is None else ():
        _log.warning("worker_unencrypted", pool=config.name, address=address, remedy="launch.tls")
    module, _, attribute = registry.launcher(launch.use).target.partition(":")
    make = getattr(importlib.import_module(module), attribute)
    context = LaunchContext(
        count=launch.count,
        addresses=launch.addresses,
        secret_env=launch.secret_env,
        tls=_worker_tls(launch, base_dir),
        config=registry.validate_launcher(launch.use, launch.with_),
        env=env,
        log=_relay,
    )
    try:
        return cast(Launcher, make(context))
    except LaunchError as error:
        what = str(error) if str(error).startswith("launch.") else f"launch: {error}"
        raise BuildError(f"models[{model}].pools[{config.name}].{what}") from error


def _worker_tls(launch: Launch, base_dir: Path) -> TlsFiles | None:
    if launch.tls is None:
        return None
    ca, cert, key = (base_dir / Path(name).expanduser() for name in (launch.tls.ca, launch.tls.cert, launch.tls.key))
    return TlsFiles(ca, cert, key, launch.tls.server_name)


def _request_log(settings: Settings, base_dir: Path) -> RequestLog | None:
    name = settings.telemetry.request_log
    if name is None:
        return None
    try:
        return RequestLog(base_dir / name)
    except OSError as error:
        raise BuildError(f"telemetry.request_log: {base_dir / name} cannot be written: {error.strerror}") from error


def _relay(worker: str, line: str) -> None:
    """A worker's log line goes out as it came: it is a log line of our own kind, with the worker's name in it."""
    sys.stderr.write(f"{line}\n")
