"""The ``forebay`` script: one module per command, registered here.

Rules
- A command module imports only typer, ``gateway.cli.*`` helpers and the standard library at its top; what it needs
  of the gateway or a worker it imports when it runs, so that ``forebay --help`` and shell completion stay fast.
- A user's mistake raises ``UserError`` (or the config loader's error): one message on stderr, no traceback.
  Exit codes: 0 done · 1 the checked thing is wrong · 2 wrong usage · 130 interrupted.
- What another program may read goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys

import typer

from gateway.cli import config, doctor, model, plugins, serve, token, worker
from gateway.cli.output import UserError, complain

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
plugins.register(app)
doctor.register(app)
model.register(app)


def main() -> None:
    """Run the command of ``sys.argv`` and exit with its code."""
    try:
        app()
    except UserError as error:
        complain(str(error))
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has left: nothing is wrong, and nothing more can be said.
        sys.stderr.close()
        sys.exit(0)
