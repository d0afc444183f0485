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
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Techniques whose names begin so; may be given several times."),
    ] = None,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Prompt tokens.")] = 512,
    output_tokens: Annotated[int, typer.Option("--output", min=2, help="Answer tokens.")] = 128,
    long_tokens: Annotated[int, typer.Option("--long", min=64, help="Tokens of a long prompt, for the tiers.")] = 3000,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long a load is served (roles).")] = 20.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs of both settings, in alternation.")] = 3,
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="SOURCE", help="A smaller model that guesses.")
    ] = None,
    json: Json = None,
) -> None:
    """Each of the engine's switches on and off in turn, on a load that shows what it is for."""
    with speaking():
        from gateway.bench.display import Display
        from gateway.bench.techniques.catalogue import pick, table, techniques_report
        from gateway.bench.techniques.lab import Shape

        chosen = pick(only)
        target = _target(config, model, pool, settings)
        shape = Shape(input_tokens, output_tokens, long_tokens, rounds, seconds)
        with Display() as display:
            report = techniques_report(target, display, chosen, shape, draft=draft)
        emit(report, [table(report)], json)
