"""The typer application: which commands there are."""

from __future__ import annotations

import typer

from gateway.cli import (
    adapters,
    audit,
    bench,
    cache,
    config,
    doctor,
    evaluate,
    keys,
    model,
    plugins,
    requests,
    serve,
    simulate,
    token,
    top,
    usage,
    worker,
)

app = typer.Typer(
    name="forebay",
    help="A multi-tenant gateway and scheduler in front of language-model workers.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
serve.register(app)
worker.register(app)
token.register(app)
config.register(app)
cache.register(app)
adapters.register(app)
plugins.register(app)
doctor.register(app)
model.register(app)
bench.register(app)
evaluate.register(app)
top.register(app)
simulate.register(app)
requests.register(app)
keys.register(app)
audit.register(app)
usage.register(app)
