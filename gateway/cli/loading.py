"""The configuration file as commands read it: a name or path in, settings out, every mistake as one message."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli.output import UserError

if TYPE_CHECKING:
    from gateway.settings import Settings

DEFAULT = "demo"


def load_settings(name: str | None = None) -> tuple[Settings, Path]:
    """Settings and the file they came from; without a name the demo's. Raises UserError with every mistake."""
    from gateway.config_file import ConfigError, load
    from gateway.paths import PathError, resolve_config

    try:
        path = resolve_config(name or DEFAULT)
    except PathError as error:
        raise UserError(str(error), code=2) from None
    try:
        return load(path), path
    except ConfigError as error:
        raise UserError(str(error)) from None
