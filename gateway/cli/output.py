"""How commands speak: results on stdout, everything else on stderr, a user's mistake as one message."""

from __future__ import annotations

import sys


class UserError(Exception):
    """Something the user can mend. The message names what is wrong and the remedy; it may have several lines."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def say(message: str = "") -> None:
    """A line for the person at the terminal (stderr)."""
    print(message, file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """The message of a ``UserError``, marked as such (stderr)."""
    mark = "\x1b[31merror:\x1b[0m" if sys.stderr.isatty() else "error:"
    print(f"{mark} {message}", file=sys.stderr, flush=True)
