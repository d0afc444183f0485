"""Which Forebay this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed distribution's version; ``source`` where it runs from a working tree."""
    try:
        return metadata.version("forebay")
    except metadata.PackageNotFoundError:
        return "source"
