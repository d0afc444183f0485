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
    from gateway.cli import bench_gateway, bench_start, bench_techniques  # noqa: F401 - they add themselves to the group

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
    with speaking():
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
        emit(report, [runs_table(f"engine, {input_tokens} in / {output_tokens} out", report.runs)], json)
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
    with speaking():
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
        emit(report, [rates, table], json)


@group.command()
def serve(
    url: Annotated[str, typer.Option("--url", help="The server: http://host:port, with or without /v1.")],
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", metavar="[NAME=]KEY", help="A tenant's key; env:VARIABLE reads it from there."),
    ] = None,
    share: Annotated[str, typer.Option("--share", help="Parts of the requests per key: 4,2,1. Default: equal.")] = "",
    model: Annotated[str, typer.Option("--model", help="Default: the first that the server lists.")] = "",
    endpoint: Annotated[str, typer.Option("--endpoint", help="completions, or chat (text prompts).")] = "completions",
    prompts: Annotated[str, typer.Option("--prompts", help="ids, or text where a server takes no ids.")] = "ids",
    vocab: Annotated[int, typer.Option("--vocab", min=20, help="Prompt ids are drawn below it.")] = 30_000,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--eos", help="Ask for answers of full length.")] = True,
    input_tokens: Annotated[str, typer.Option("--input", help="512, 8-32 or lognormal:MEAN:SIGMA:MAX.")] = "512",
    output_tokens: Annotated[str, typer.Option("--output", help="Likewise.")] = "128",
    concurrency: Annotated[str, typer.Option("--concurrency", help="Closed loop: under way at once, 1,8.")] = "",
    rate: Annotated[str, typer.Option("--rate", help="Open loop: Poisson arrivals per second, 0.5,1.")] = "",
    replay: Annotated[Path | None, typer.Option("--replay", help="A request log (forebay requests export).")] = None,
    speed: Annotated[float, typer.Option("--speed", help="Play the log so many times as fast.")] = 1.0,
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="Per run.")] = None,
    duration_s: Annotated[float | None, typer.Option("--duration-s", min=0.1, help="Of an open loop; 60.")] = None,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="Requests per tenant beforehand.")] = 4,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, help="Per request.")] = 600.0,
    metrics: Annotated[
        list[str] | None, typer.Option("--metrics", metavar="URL", help="The gateway's or a worker's /metrics.")
    ] = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    slo_e2e_ms: SloE2e = None,
    seed: Seed = 0,
    json: Json = None,
    plots: Plots = None,
) -> None:
    """Any OpenAI-compatible server under load: closed loop, open loop, or a recorded log."""
    with speaking():
        from gateway.bench import online, traffic
        from gateway.bench.display import Display
        from gateway.bench.render import plot_runs, runs_table, tenants_table
        from gateway.bench.serve import Server

        server = Server(url, model, online.endpoint(endpoint), ignore_eos, timeout_s)
        closed = _counts(concurrency) if concurrency else []
        rates = _figures("--rate", rate)
        if not closed and not rates and replay is None:
            closed = [1, 8]
        plan = online.Plan(
            callers=traffic.tenants(api_key or [], _figures("--share", share)),
            prompts=online.prompts(prompts, server.endpoint, vocab),
            inputs=traffic.lengths(input_tokens, "--input"),
            outputs=traffic.lengths(output_tokens, "--output"),
            concurrency=closed,
            rates=rates,
            replay=replay,
            speed=speed,
            requests=requests,
            duration_s=duration_s,
            warm_up=warm_up,
            seed=seed,
            slo=_slo(slo_ttft_ms, slo_tpot_ms, slo_e2e_ms),
            metrics_urls=metrics or (),
        )
        with Display() as display:
            report = online.serve_report(server, plan, display)
        title = f"{report.versions['server']}, {report.versions['model']}"
        emit(report, [runs_table(title, report.runs, "load"), *tenants_table(report.runs)], json)
        if plots is not None:
            _named(plot_runs(plots, {"server": report.runs}))


@group.command()
def compare(
    a: Annotated[str, typer.Argument(help="A configuration, or a command (in quotes) that writes a report to {json}.")],
    b: Annotated[str, typer.Argument(help="The other one.")],
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Both run so often, in alternating order.")] = 5,
    input_tokens: Input = 512,
    output_tokens: Output = 128,
    concurrency: Counts = "1,8,32,64",
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="Per run; default: whole waves.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, help="Of one run.")] = 3600.0,
    json: Json = None,
) -> None:
    """Two configurations or commands in alternation: ratios with their spread."""
    _counts(concurrency)
    with speaking():
        from gateway.bench import compare as comparing
        from gateway.bench.display import Display

        options = ["--input", str(input_tokens), "--output", str(output_tokens), "--concurrency", concurrency]
        if requests is not None:
            options += ["--requests", str(requests)]
        sides = (comparing.side(a, options), comparing.side(b, options))
        with Display() as display:
            report = comparing.compare(sides, rounds, display, timeout_s=timeout_s)
        emit(report, [comparing.table(report)], json)


@group.command()
def peers(
    vllm_python: Annotated[Path | None, typer.Option("--vllm-python", help="An interpreter that has vLLM.")] = None,
    openvino_python: Annotated[Path | None, typer.Option("--openvino-python", help="One with OpenVINO GenAI.")] = None,
    llama_python: Annotated[Path | None, typer.Option("--llama-python", help="One with llama-cpp-python.")] = None,
    config: Config = "demo",
    model: Model = None,
    pool: Pool = None,
    settings: Set = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Every engine runs everything so often.")] = 3,
    only: Annotated[list[str] | None, typer.Option("--only", help="throughput, gap, gap-512, burst …")] = None,
    input_tokens: Input = 512,
    output_tokens: Output = 128,
    concurrency: Counts = "1,8,32,64",
    burst: Annotated[int, typer.Option("--burst", min=1, help="Requests of the burst.")] = 200,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and cache, for everybody.")] = "bfloat16",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="For all; default: one per core.")] = None,
    chunk: Annotated[int | None, typer.Option("--chunk", min=1, help="Step budget; default: their own.")] = None,
    json: Json = None,
    plots: Plots = None,
) -> None:
    """Other engines on this machine under the same loads as ours, in turn, and the ratios."""
    counts = _counts(concurrency)
    with speaking():
        from gateway.bench.display import Display
        from gateway.bench.peers import contest, known, scenarios
        from gateway.bench.peers.wire import Settings
        from gateway.bench.render import plot_runs

        target = _target(config, model, pool, settings)
        found = known.find({"vllm": vllm_python, "openvino": openvino_python, "llama.cpp": llama_python})
        sizes = scenarios.Sizes(input=input_tokens, output=output_tokens, concurrency=tuple(counts), burst=burst)
        base = Settings(dtype=dtype, threads=threads or _cores(), max_step_tokens=chunk)
        chosen = scenarios.pick(scenarios.scenarios(sizes, base), only or ())
        race = contest.of(target, found, sizes)
        say(f"engines: {', '.join(item.peer.name for item in race.engines)}")
        with Display() as display:
            race.go(chosen, rounds, display)
        report = race.report(chosen, {"rounds": rounds, "settings": base.to_json()})
        emit(report, contest.tables(report, chosen), json)
        if plots is not None:
            _named(plot_runs(plots, contest.throughput_runs(report)))


@group.command()
def tables(
    config: Config = "demo",
    model: Model = None,
    pool: Pool = None,
    settings: Set = None,
    only: Annotated[str, typer.Option("--only", help="Which tables: 1,3. Default: all six.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Small loads: to see that it runs, not to publish.")] = False,
    seed: Seed = 0,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables there as Markdown.")] = None,
    json: Json = None,
) -> None:
    """The tables by which engines are usually compared, measured anew here."""
    with speaking():
        from gateway.bench.display import Display
        from gateway.bench.render import write_markdown
        from gateway.bench.tables import catalogue
        from gateway.bench.tables.lab import QUICK, Sizes

        chosen = catalogue.numbers(only)
        target = _target(config, model, pool, settings)
        with Display() as display:
            report, made = catalogue.tables_report(target, display, chosen, QUICK if quick else Sizes(), seed)
        emit(report, made, json)
        if markdown is not None:
            write_markdown(markdown, made)


@contextmanager
def speaking() -> Iterator[None]:
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


def _figures(option: str, text: str) -> list[float]:
    """Positive figures parted by commas; none for an empty text."""
    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0.0]
    if any(not 0 < figure < float("inf") for figure in found):
        raise UserError(f"{option} {text!r}: write figures above 0, parted by commas", code=2)
    return found


def _cores() -> int:
    from gateway.bench.report import machine

    return int(machine()["cores"])


def _slo(ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None) -> Slo:
    from gateway.bench.metrics import Slo

    return Slo(ttft_ms, tpot_ms, e2e_ms)


def emit(report: Report, tables: list[Table], json: Path | None) -> None:
    """Tables on stdout, the report into its file; with ``--json -`` the report alone goes to stdout."""
    from gateway.bench.render import show

    if json is not None:
        report.write(json)
    if str(json) != "-":
        show(tables)


def _named(paths: list[Path]) -> None:
    for path in paths:
        say(f"plot: {path}")
