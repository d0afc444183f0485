"""``forebay worker``: one model worker; what ``serve`` launches, and what an operator may start by hand."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command. Its options are the worker process's own (``workers/main.py``), so that there is one list."""
    app.command(
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(worker)


def worker(context: typer.Context) -> None:
    """Run one worker by hand.

    It loads a model and serves it to a gateway whose pool has launch: {use: static}.
    """
    from workers.main import main

    raise typer.Exit(main(context.args))
