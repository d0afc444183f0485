"""The process's own logging, put back as it was."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import structlog

_NAMES = ("forebay", "gateway", "policies", "workers", "uvicorn.access", "uvicorn.error", "urllib3")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever the block configures is undone."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in _NAMES}
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)
        for name, old in levels.items():
            logging.getLogger(name).setLevel(old)
