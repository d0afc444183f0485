"""The cache epoch of every tenant. It only rises, and outlives the process where there is a folder for that.

Rules
- Without a file every start begins at 0. That is safe while workers die with their gateway, or the server secret does;
  with a fixed secret and workers that live on, what a purge did not reach could be hit again: set ``state.path``.
- The file is replaced whole (written aside, synced, renamed), so that a crash leaves the old one or the new one.
- One writer: ``save`` runs in a thread, one at a time, with what is true when it begins.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from zlib import crc32

from policies.types import TenantId

FILE = "cache-epochs.json"


class Epochs:
    """Epochs by tenant; a tenant that is not here is at 0."""

    def __init__(self, path: Path | None = None) -> None:
        """``path``: the file. Raises ValueError for one that cannot be read: purges would be undone by guessing."""
        self._path = path
        self._saving = asyncio.Lock()
        self._epochs: dict[TenantId, int] = {} if path is None else _read(path)

    def get(self, tenant: TenantId) -> int:
        """The current epoch."""
        return self._epochs.get(tenant, 0)

    def bump(self, tenant: TenantId) -> int:
        """The next one, in force at once. ``save`` it before anybody is told."""
        self._epochs[tenant] = self.get(tenant) + 1
        return self._epochs[tenant]

    async def save(self) -> None:
        """Write them down. Raises OSError. Does nothing without a file."""
        if self._path is not None:
            async with self._saving:
                await asyncio.to_thread(write_whole, self._path, json.dumps(self._epochs, sort_keys=True))


def window(tenant: str, retention_s: float | None, now: float) -> int:
    """The number of a tenant's retention window (``retention.py``) at Unix time ``now``; 0 without a retention time."""
    if retention_s is None:
        return 0
    return 1 + int(now / retention_s + crc32(tenant.encode("utf-8", "surrogatepass")) / 2**32)


def window_end(tenant: str, retention_s: float | None, number: int) -> float:
    """Unix time at which a tenant's window ``number`` ends; 0 without a retention time."""
    if retention_s is None:
        return 0.0
    return (number - crc32(tenant.encode("utf-8", "surrogatepass")) / 2**32) * retention_s


def _read(path: Path) -> dict[TenantId, int]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"state.path: {path} cannot be read ({type(error).__name__}); restore or remove it") from error
    if not isinstance(data, dict) or not all(isinstance(epoch, int) and epoch >= 0 for epoch in data.values()):
        raise ValueError(f"state.path: {path} does not hold cache epochs; restore or remove it")
    return {TenantId(tenant): epoch for tenant, epoch in data.items()}


def write_whole(path: Path, text: str) -> None:
    """Replace a file: the old one or the new one is there, never a part. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
