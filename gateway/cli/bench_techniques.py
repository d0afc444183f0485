"""``forebay bench techniques``: what each of the engine's switches brings here, and what it takes."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.bench import Config, Json, Model, Pool, Set, _target, emit, group, speaking


@group.command()
def techniques(
    config: Config = "demo",
    model: Model = None,
    pool: Pool = None,
    settings: Set = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAMES", help="Techniques whose names begin so, with commas.")
    ] = None,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Prompt tokens.")] = 512,
    output_tokens: Annotated[int, typer.Option("--output", min=2, help="Answer tokens.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs of both settings, in alternation.")] = 3,
    json: Json = None,
) -> None:
    """Each of the engine's switches on and off in turn, on a load that shows what it is for."""
    with speaking():
        from gateway.bench.display import Display
        from gateway.bench.techniques import Shape, pick, table, techniques_report

        chosen = pick([name.strip() for name in only.split(",")] if only else None)
        target = _target(config, model, pool, settings)
        with Display() as display:
            report = techniques_report(target, display, chosen, Shape(input_tokens, output_tokens, rounds))
        emit(report, [table(report)], json)
