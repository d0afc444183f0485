"""What every section of the YAML is built on."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ConfigDict

from policies.strict import StrictScalars

Path = tuple[str | int, ...]
Mistake = tuple[Path, str]


class SettingsError(ValueError):
    """Mistakes that only show when several keys are read together; each has its path below the validated section."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {message}" for path, message in mistakes))
        self.mistakes = mistakes


class Section(StrictScalars):
    """Base of every section: unknown keys and infinite numbers are errors, instances are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def refuse(mistakes: Iterable[Mistake]) -> None:
    """Raise SettingsError with all of them, if there is one."""
    found = list(mistakes)
    if found:
        raise SettingsError(found)
