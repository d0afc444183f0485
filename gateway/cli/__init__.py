"""The ``forebay`` script: one module per command, registered in ``commands.py``.

Rules
- A command module imports only typer, ``gateway.cli.*`` helpers and the standard library at its top; what it needs
  of the gateway or a worker it imports when it runs, so that ``forebay --help`` and shell completion stay fast.
- A user's mistake raises ``UserError`` (or the config loader's error): one message on stderr, no traceback.
  Exit codes: 0 done · 1 the checked thing is wrong · 2 wrong usage · 130 interrupted.
- What another program may read goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys

from gateway.cli.commands import app
from gateway.cli.output import UserError, complain

__all__ = ["app", "main"]


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
