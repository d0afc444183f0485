"""``engine.tiers``: where blocks of the prefix cache go when the device needs their place. No torch.

The sizes' unit is bytes. ``disk`` needs ``host``: what leaves or enters the disk passes through host memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from policies.strict import StrictScalars
from workers.sizes import Bytes

WEEK_S = 604_800.0


class HostTierConfig(StrictScalars):
    """Blocks in this machine's memory, beside the device's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["host"]
    size: Bytes


class DiskTierConfig(StrictScalars):
    """Blocks in files of a folder that only this worker's user can read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["disk"]
    path: str
    """A folder, made if it is not there; relative to the YAML's. Workers may share it: each has its own in it."""
    size: Bytes
    max_age_s: float = Field(WEEK_S, gt=0, allow_inf_nan=False)
    """Files that were not used for so long are removed when a worker starts."""

    @field_validator("path")
    @classmethod
    def _a_path(cls, value: str) -> str:
        if not value.strip() or "\0" in value:
            raise ValueError(f"{value!r} is not a folder; write a path, e.g. ./kv-cache")
        return value

    def folder(self, base_dir: str | Path) -> Path:
        """Where ``path`` is. Raises ValueError where no files can be written, and trying again would not help.

        Changes nothing: what is not there yet is made later.
        """
        try:
            folder = Path(base_dir) / Path(self.path).expanduser()
            why = _unusable(folder)
        except RuntimeError as error:  # no such home
            why = str(error)
        if why is not None:
            raise ValueError(f"path {self.path!r} of the tier of kind disk: {why}; name a folder that can be written")
        return folder


def _unusable(folder: Path) -> str | None:
    for place in (folder, *folder.absolute().parents):
        try:
            mode = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{place} cannot be looked at ({error.strerror})"
        if not stat.S_ISDIR(mode):
            return f"{place} is no folder"
        return None if os.access(place, os.W_OK | os.X_OK) else f"user {os.geteuid()} may not write in {place}"
    return None


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)


TierConfig = Annotated[
    Annotated[HostTierConfig, Tag("host")] | Annotated[DiskTierConfig, Tag("disk")],
    Discriminator(
        _kind,
        custom_error_type="tier_kind",
        custom_error_message="a tier has a kind, host or disk; write e.g. {kind: host, size: 1GiB}",
    ),
]


def checked(tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
    """Raises ValueError for two of a kind, and for a disk without host memory above it."""
    kinds = [tier.kind for tier in tiers]
    for kind in set(kinds):
        if kinds.count(kind) > 1:
            raise ValueError(f"there are {kinds.count(kind)} tiers of kind {kind}; write one of each kind at most")
    if kinds == ["disk", "host"]:
        raise ValueError("the order is from fast to slow: write kind host before kind disk")
    if kinds == ["disk"]:
        raise ValueError(
            "a tier of kind disk needs one of kind host above it, which its blocks pass through; add e.g. "
            "{kind: host, size: 1GiB}"
        )
    return tiers
