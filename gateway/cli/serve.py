"""``forebay serve CONFIG``: the gateway and its workers, until told to stop."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import UserError, say

if TYPE_CHECKING:
    import socket

    from gateway.config_file import Loaded
    from gateway.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    config: Annotated[str, typer.Argument(help="The YAML file, or the name of a shipped one (demo).")],
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", help="Write URLs, ports and process id here once the listeners are open."),
    ] = None,
    dev: Annotated[
        bool, typer.Option("--dev", help="Sign tokens with this machine's development key, made when it is missing.")
    ] = False,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="debug, info, warning or error, instead of the configuration's.")
    ] = None,
) -> None:
    """Start the gateway and its workers.

    Ctrl-C or SIGTERM lets running requests finish and exits with 0; a second Ctrl-C ends it at once.
    """
    from gateway.cli.loading import load_config

    loaded = load_config(config)
    environment = dict(os.environ)
    if dev:
        _add_dev_key(loaded.settings, environment)
    from gateway.log import LEVEL_ENV

    level = environment[LEVEL_ENV] = log_level or loaded.settings.log.level  # the workers' too
    code = _run(Start(loaded, environment, ready_file, dev, level))
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class Start:
    """What one ``serve`` was asked for."""

    loaded: Loaded
    environment: dict[str, str]
    ready_file: Path | None
    dev: bool
    log_level: str

    @property
    def settings(self) -> Settings:
        """The file's content."""
        return self.loaded.settings


def _add_dev_key(settings: Settings, environment: dict[str, str]) -> None:
    """Put the development key where the auth policy looks for it, unless a key is set there."""
    from gateway.cli.devkey import jwt_settings, make_dev_key
    from policies.locality import is_loopback

    host = settings.listen.host
    if not is_loopback(host):
        raise UserError(f"listen.host: --dev serves this machine only, not {host!r}. Set a key and leave --dev out.")
    jwt = jwt_settings(settings)
    if jwt is not None and jwt.key_env is not None and not environment.get(jwt.key_env):
        environment[jwt.key_env] = make_dev_key()


def _run(start: Start) -> int:
    """Bind, build, serve."""
    import contextlib

    import uvloop

    from gateway.cli.listener import bind
    from gateway.log import configure

    try:
        configure("gateway", level=start.log_level, format=start.settings.log.format)
    except ValueError as error:
        raise UserError(f"--log-level: {error}", code=2) from None
    settings = start.settings
    with contextlib.ExitStack() as sockets:
        public = sockets.enter_context(contextlib.closing(bind(settings.listen.host, settings.listen.port, "listen")))
        admin = sockets.enter_context(contextlib.closing(bind(settings.admin.host, settings.admin.port, "admin")))
        with contextlib.ExitStack() as files:
            if start.ready_file is not None:
                files.callback(start.ready_file.unlink, missing_ok=True)
            return uvloop.run(_serve(start, public, admin))


async def _serve(start: Start, public: socket.socket, admin: socket.socket) -> int:
    from gateway.app import admin_app, public_app
    from gateway.cli.lifetime import run
    from gateway.cli.listener import Listener, url_of
    from gateway.cli.model import progress_bar
    from gateway.collection import keep_what_is_here
    from gateway.compose import build
    from gateway.lane import hand_over_soon
    from gateway.pages import use_large_pages
    from policies.spi import PolicyStartError

    loaded = start.loaded
    try:
        gateway = build(loaded.settings, base_dir=loaded.base_dir, env=start.environment, config_path=loaded.path)
        admin_api = admin_app(gateway)
    except ValueError as error:  # BuildError, and an admin listener that would be open to the network
        raise UserError(f"{loaded.path}: {error}") from None
    own, admins = gateway.parts.certificates.listen, gateway.parts.certificates.admin
    listeners = [
        Listener(public_app(gateway), public, start.settings.listen.max_connections, own.context if own else None),
        Listener(admin_api, admin, tls=admins.context if admins else None),
    ]
    base_url, admin_url = url_of(public, tls=own is not None), url_of(admin, tls=admins is not None)

    def up() -> None:
        if start.ready_file is not None:
            _write_ready(start.ready_file, base_url, admin_url)
        say(_banner(start, base_url, admin_url))
        keep_what_is_here()
        use_large_pages()
        hand_over_soon()

    def forced() -> None:
        if start.ready_file is not None:
            start.ready_file.unlink(missing_ok=True)

    try:
        with progress_bar() as gateway.progress:
            return await run(gateway, listeners, up, forced)
    except PolicyStartError as error:
        raise UserError(f"{loaded.path}: policies: {error}") from None


def _write_ready(path: Path, base_url: str, admin_url: str) -> None:
    """Whole or not at all: a reader that polls for the file never sees half of it."""
    ready = {
        "pid": os.getpid(),
        "base_url": f"{base_url}/v1",
        "url": base_url,
        "admin_url": admin_url,
        "port": int(base_url.rsplit(":", 1)[1]),
        "admin_port": int(admin_url.rsplit(":", 1)[1]),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(ready) + "\n")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"--ready-file: {path} cannot be written ({error.strerror}).") from None


def _banner(start: Start, base_url: str, admin_url: str) -> str:
    """What a person needs next. Tokens are shown only with ``--dev``, where the key is this machine's own."""
    lines = [
        "",
        f"  Base URL   {base_url}/v1",
        f"  Console    {admin_url}/console",
        f"  Admin      {admin_url}  (/metrics, /admin/workers, /admin/queue)",
    ]
    tokens = _tokens(start) if start.dev else {}
    if tokens:
        lines += ["", "  Tokens (good for a day; `forebay token --tenant ID` makes more)"]
        lines += [f"    {tenant:<10} {token}" for tenant, token in tokens.items()]
        model = start.settings.models[0].name
        question = {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        lines += [
            "",
            "  Try it once /readyz answers 200 (the model is being loaded):",
            f"    curl -s {base_url}/v1/chat/completions -H 'content-type: application/json' \\",
            f"      -H 'authorization: Bearer {next(iter(tokens.values()))}' \\",
            f"      -d '{json.dumps(question)}'",
        ]
    endpoint = start.settings.telemetry.otlp_endpoint or start.environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint:
        lines += ["", f"  Traces go to {endpoint}"]
    else:
        lines += [
            "",
            "  Traces: run Jaeger (docker run --rm -p 16686:16686 -p 4317:4317 jaegertracing/jaeger) and start with",
            "    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4317, or set telemetry.otlp_endpoint; then open",
            "    http://127.0.0.1:16686",
        ]
    return "\n".join([*lines, ""])


def _tokens(start: Start) -> dict[str, str]:
    from gateway.cli.devkey import jwt_settings
    from gateway.cli.token import sign

    jwt = jwt_settings(start.settings)
    if jwt is None or jwt.key_env is None:
        return {}
    key = start.environment[jwt.key_env]
    return {tenant.id: sign(jwt, key, tenant.id) for tenant in start.settings.tenants}
