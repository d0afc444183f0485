"""``forebay bench start``: how long a worker takes to be ready, and what memory it needs."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.bench import Config, Json, Model, Pool, Set, _target, emit, group, speaking


@group.command()
def start(
    config: Config = "demo",
    model: Model = None,
    pool: Pool = None,
    settings: Set = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Workers started, one after the other.")] = 3,
    running: Annotated[int, typer.Option("--running", min=1, help="Requests at once as soon as it is ready.")] = 64,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Prompt tokens.")] = 512,
    output_tokens: Annotated[int, typer.Option("--output", min=1, help="Answer tokens.")] = 16,
    json: Json = None,
) -> None:
    """A worker's start until it is ready, and the most memory it holds under a load."""
    with speaking():
        from gateway.bench.display import Display
        from gateway.bench.start import Load, start_report, start_table

        target = _target(config, model, pool, settings)
        with Display() as display:
            report = start_report(target, Load(running, input_tokens, output_tokens), rounds, display)
        emit(report, [start_table(report)], json)
