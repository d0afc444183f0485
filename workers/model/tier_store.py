"""The bytes of both tiers, as the engine's ``TierStore``; and what their files depend on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from workers.config import EngineConfig
from workers.engine.block_hash import BlockKey
from workers.engine.tier_desk import Read, TierReport
from workers.engine.tier_files import File
from workers.model.disk_tier import DiskTier
from workers.model.host_tier import HostTier

LOSSY = ("dtype", "kv_dtype", "weight_dtype")
"""Settings that change what a model's keys and values are."""


class Store:
    """Host memory, and a disk below it or none."""

    def __init__(self, host: HostTier, disk: DiskTier | None) -> None:
        self.host, self._disk = host, disk
        self.slots = host.slots
        self.files = 0 if disk is None else disk.files
        self.block_bytes = host.block_bytes

    def begin(self, report: Callable[[TierReport], None]) -> None:
        """Start the disk's thread."""
        if self._disk is not None:
            self._disk.begin(report)

    def write(self, slot: int, file: File) -> None:
        """Copy a slot's bytes and have them written."""
        if self._disk is not None:
            self._disk.write(file, self.host.read(slot))

    def unlink(self, key: BlockKey) -> None:
        """Have a file removed."""
        if self._disk is not None:
            self._disk.unlink(key)

    def read(self, key: BlockKey) -> None:
        """Have a file read."""
        if self._disk is not None:
            self._disk.read(key)

    def place(self, slot: int | None, report: Read) -> None:
        """Take over what was read."""
        if slot is not None and report.data is not None:
            self.host.place(slot, report.data)
        if self._disk is not None:
            self._disk.taken()

    def zero(self, slots: list[int]) -> None:
        """Overwrite slots with zeros."""
        self.host.zero(slots)

    def moved(self) -> tuple[int, int]:
        """(blocks, ns) of saves and restores since the last call."""
        return self.host.moved()

    def close(self) -> None:
        """End the disk's thread."""
        if self._disk is not None:
            self._disk.close()


def open_store(
    config: EngineConfig, host: HostTier | None, *, revision: str, layout: str, dtype: str, base_dir: str | Path
) -> Store | None:
    """What ``config.tiers`` asks for around a runner's ``host``; None without tiers.

    ``layout``: what names the cache's kind, ``dtype`` what it computes in. Raises ValueError for a disk too small, and
    for a path where nothing can be written.
    """
    if host is None:
        return None
    disk, asked = None, config.disk_tier
    if asked is not None:
        about = {
            "revision": revision,
            "layout": layout,
            "block_size": config.block_size,
            "block_bytes": host.block_bytes,
            "byteorder": sys.byteorder,
            **{name: str(getattr(config, name, None)) for name in LOSSY},
            "dtype": dtype,
        }
        fingerprint = sha256(json.dumps(about, sort_keys=True).encode()).digest()
        try:
            path = asked.folder(base_dir)
        except ValueError as error:
            raise ValueError(f"engine.tiers[{config.tiers.index(asked)}].path: {error}") from None
        disk = DiskTier(path, asked.size, host.block_bytes, fingerprint, asked.max_age_s)
    return Store(host, disk)
