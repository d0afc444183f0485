"""``forebay requests export``: the gateway's request log as traffic to replay, or as a scenario like it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import UserError, say
from workers.plain import escaped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.simulate.traffic_log import Row

group = typer.Typer(help="Recorded requests.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="requests")


@group.callback()
def requests() -> None:
    """Recorded requests (telemetry.request_log), without their content."""


@group.command()
def export(
    log: Annotated[Path, typer.Argument(help="The gateway's request log (telemetry.request_log).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here; .csv for CSV, else JSON lines. None: stdout.")
    ] = None,
    tenant: Annotated[list[str] | None, typer.Option("--tenant", help="Only this tenant; may be repeated.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only requests to this model.")] = None,
    synthesise: Annotated[
        Path | None, typer.Option("--synthesise", help="Write a scenario with distributions fitted to the traffic.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Take the tenants' weights from this configuration.")
    ] = None,
) -> None:
    """Turn the request log into arrival, tenant, prompt and output length, prefix: for simulate and bench."""
    import sys

    from gateway.simulate.export import export as read
    from gateway.simulate.traffic_log import TrafficLogError, write

    try:
        found = read(log, tenants=tenant or (), model=model)
    except TrafficLogError as error:
        raise UserError(str(error)) from None
    if not found.rows:
        raise UserError(f"{log}: holds no request with output ({found.refused} without, {found.foreign} other lines).")
    if output is not None:
        _write(found.rows, output)
    elif synthesise is None:
        write(found.rows, sys.stdout, as_csv=False)
    say(
        f"{len(found.rows)} requests of {len({row.tenant for row in found.rows})} tenants; "
        f"left out: {found.refused} without output, {found.foreign} other lines."
    )
    if synthesise is not None:
        _synthesise(found.rows, synthesise, output, config)


def _write(rows: Sequence[Row], path: Path) -> None:
    from gateway.simulate.traffic_log import write

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            write(rows, file, as_csv=path.suffix.lower() == ".csv")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def _synthesise(rows: Sequence[Row], path: Path, exported: Path | None, config: Path | None) -> None:
    import os

    import yaml

    from gateway.simulate.synthesise import scenario

    log = exported or path.with_suffix(".traffic.csv")
    try:
        data, fits = scenario(
            rows,
            log_file=os.path.relpath(log, path.parent),
            weights=_weights(config),
            description=f"like the traffic in {log.name}" if exported else "like recorded traffic",
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if exported is None and any(found.arrivals is None for found in fits):
        _write(rows, log)
    try:
        path.write_text(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    for found in fits:
        arrivals = (
            f"{found.arrivals.spec['kind']} (KS {found.arrivals.ks:.3f})" if found.arrivals else "replayed as recorded"
        )
        say(
            f"{escaped(found.tenant)}: {found.count} requests; arrivals {arrivals}, prompt {found.prompt.spec['kind']} "
            f"(KS {found.prompt.ks:.3f}), output {found.output.spec['kind']} (KS {found.output.ks:.3f})"
        )


def _weights(config: Path | None) -> dict[str, float]:
    if config is None:
        return {}
    from gateway.cli.loading import load_config

    return {tenant.id: tenant.weight for tenant in load_config(str(config)).settings.tenants}
