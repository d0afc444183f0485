"""``forebay bench …``: how fast it is, beside what the machine could do and what other engines do on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import UserError, say

if TYPE_CHECKING:
    from gateway.bench.metrics import Slo
    from gateway.bench.render import Table
    from gateway.bench.report import Report
    from gateway.bench.target import Target

group = typer.Typer(help="Benchmarks.", no_args_is_help=True)

Config = Annotated[str, typer.Option("--config", help="Configuration whose model and engine settings are measured.")]
Model = Annotated[str | None, typer.Option("--model", help="Which of its models; the first one without.")]
Pool = Annotated[str | None, typer.Option("--pool", help="Which of the model's pools; the first one without.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another engine setting.")]
Input = Annotated[int, typer.Option("--input", min=1, help="Prompt tokens.")]
Output = Annotated[int, typer.Option("--output", min=1, help="Answer tokens.")]
Counts = Annotated[str, typer.Option("--concurrency", help="Requests under way at once: 1,8,32,64.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the report there (- for stdout, then no tables).")]
Plots = Annotated[Path | None, typer.Option("--plots", help="Write PNG plots into this folder (needs matplotlib).")]
Seed = Annotated[int, typer.Option("--seed", help="Draws the prompts; another seed, other prompts.")]
SloTtft = Annotated[float | None, typer.Option("--slo-ttft-ms", min=0, help="Goodput: time to first token.")]
SloTpot = Annotated[float | None, typer.Option("--slo-tpot-ms", min=0, help="Goodput: mean time per further token.")]
SloE2e = Annotated[float | None, typer.Option("--slo-e2e-ms", min=0, help="Goodput: time to the end.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="bench")


@group.command()
def engine(
    config: Config = "demo",
    model: Model = None,
    pool: Pool = None,
    settings: Set = None,
    input_tokens: Input = 512,
    output_tokens: Output = 128,
    concurrency: Counts = "1,8,32,64",
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="Per run; default: whole waves.")] = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_e2e_ms: SloE2e = None,
    floor: Annotated[bool, typer.Option("--floor/--no-floor", help="Measure what the machine could do.")] = True,
    seed: Seed = 0,
    json: Json = None,
    plots: Plots = None,
) -> None:
    """Our engine in this process: equal requests in a closed loop."""
    counts = _counts(concurrency)
    with _speaking():
        from gateway.bench.display import Display
        from gateway.bench.offline import engine_report
        from gateway.bench.render import plot_runs, runs_table

        target = _target(config, model, pool, settings)
        with Display() as display:
            report = engine_report(
                target,
                display,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                concurrency=counts,
                requests=requests,
                seed=seed,
                slo=_slo(slo_ttft_ms, slo_tpot_ms, slo_e2e_ms),
                with_floor=floor,
            )
        _emit(report, [runs_table(f"engine, {input_tokens} in / {output_tokens} out", report.runs)], json)
        if plots is not None:
            _named(plot_runs(plots, {"forebay": report.runs}))


@group.command(name="floor")
def floor_(
    config: Config = "demo",
    model: Model = None,
    pool: Pool = None,
    settings: Set = None,
    input_tokens: Input = 512,
    output_tokens: Output = 128,
    concurrency: Counts = "1,8,32,64",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; default: as served.")
    ] = None,
    json: Json = None,
) -> None:
    """What this machine could do at most: its measured rates, and the least time of a load."""
    counts = _counts(concurrency)
    with _speaking():
        from gateway.bench.display import Display
        from gateway.bench.offline import floor_report
        from gateway.bench.render import Table

        target = _target(config, model, pool, settings)
        with Display() as display:
            report = floor_report(
                target,
                display,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                concurrency=counts,
                dtype=dtype,
            )
        limits = report.extra["machine_limits"]
        rates = Table("machine", ("limit", "measured"), [["memory read GB/s", limits["bytes_s"] / 1e9]])
        for name, flops in limits["flops_s"].items():
            rates.add(f"{name} GFLOP/s", flops / 1e9)
        table = Table(
            f"floor, {input_tokens} in / {output_tokens} out",
            ("running", "out tok/s", "prefill s", "decode s", "decode step ms"),
        )
        for run in report.runs:
            least = run["floor"]
            cells = (least[key] for key in ("output_tokens_s", "prefill_s", "decode_s", "decode_step_ms"))
            table.add(run["concurrency"], *cells)
        _emit(report, [rates, table], json)


@contextmanager
def _speaking() -> Iterator[None]:
    """What went wrong, as a message for the user."""
    from gateway.bench.report import BenchError

    try:
        yield
    except BenchError as error:
        raise UserError(str(error)) from None


def _target(config: str, model: str | None, pool: str | None, settings: list[str] | None) -> Target:
    from gateway.bench.report import busy
    from gateway.bench.target import pick
    from gateway.cli.loading import load_config

    target = pick(load_config(config), model, pool, settings or ())
    if (warning := busy()) is not None:
        say(f"warning: {warning}")
    return target


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(
            f"--concurrency {text!r}: write whole numbers of 1 or more, parted by commas: 1,8,32,64", code=2
        )
    return counts


def _slo(ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None) -> Slo:
    from gateway.bench.metrics import Slo

    return Slo(ttft_ms, tpot_ms, e2e_ms)


def _emit(report: Report, tables: list[Table], json: Path | None) -> None:
    """Tables on stdout, the report into its file; with ``--json -`` the report alone goes to stdout."""
    from gateway.bench.render import show

    if json is not None:
        report.write(json)
    if str(json) != "-":
        show(tables)


def _named(paths: list[Path]) -> None:
    for path in paths:
        say(f"plot: {path}")
