"""The folder of one worker's disk tier: found or made, locked, swept. Blocking: the disk thread calls it.

Rules
- ``path/<fingerprint>-<n>/xx/<key>.kv``. The fingerprint names everything on which the bytes depend, so nobody meets
  another model's files. ``n`` is the first that no other worker holds, so a worker started again finds its files.
- A folder is held by a lock on its file ``lock``, which ends with the process, however that ends. A lock on a file that
  was removed meanwhile holds nothing.
- Folders are 0700, files 0600: they hold what tenants wrote, in the model's terms.
- Only what this module made is ever removed: names that do not look like it stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from workers.engine.block_hash import BlockKey
from workers.model.block_file import SUFFIX, UNFINISHED

_FOLDER = re.compile(r"[0-9a-f]{16}-\d+")
_FILE = re.compile(r"[0-9a-f]{64}\.(kv|tmp)")
MOST_WORKERS = 256


class TierFolder:
    """Held from ``claim`` to ``release``."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, parent: Path, fingerprint: bytes) -> TierFolder:
        """The first free folder. Raises OSError when none can be made or locked."""
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(MOST_WORKERS):
            folder = parent / f"{fingerprint.hex()[:16]}-{number}"
            lock = _lock(folder, make=True)
            if lock is not None:
                return cls(folder, lock)
        raise OSError(f"{MOST_WORKERS} workers hold folders in {parent}")

    def file(self, key: BlockKey) -> Path:
        """Where a block is."""
        name = key.hex()
        return self.path / name[:2] / f"{name}{SUFFIX}"

    def ready(self, path: Path) -> None:
        """Make the folder that ``path`` lies in. Raises OSError; FileNotFoundError when this folder is not there any
        more."""
        path.parent.mkdir(mode=0o700, exist_ok=True)

    def files(self) -> Iterator[tuple[Path, float]]:
        """Every block and when it was used last (Unix time). Removes what was never finished."""
        for path, used in _ours(self.path):
            if path.suffix == UNFINISHED:
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                yield path, used

    def release(self) -> None:
        """Let others have it."""
        os.close(self._lock)

    def sweep_others(self, max_age_s: float) -> None:
        """Remove folders beside it that nobody holds and nobody used for ``max_age_s``: other models', or of workers
        that are no more."""
        oldest = time.time() - max_age_s
        for folder in self.path.parent.iterdir():
            if folder == self.path or not _FOLDER.fullmatch(folder.name) or folder.is_symlink():
                continue
            with contextlib.suppress(OSError):  # another worker's sweep was here first, or it is not ours to enter
                _sweep(folder, oldest)


def _sweep(folder: Path, oldest: float) -> None:
    """Remove a folder that nobody claimed and no file of which was used since then."""
    if not _unused(folder, oldest):
        return  # before it is locked: its own worker may start just now, and would take another folder
    lock = _lock(folder, make=False)
    if lock is None:
        return
    try:
        if _unused(folder, oldest):
            _remove(folder, [path for path, _ in _ours(folder)])
    finally:
        os.close(lock)


def _unused(folder: Path, oldest: float) -> bool:
    claimed = (folder / "lock").stat(follow_symlinks=False).st_mtime
    return claimed < oldest and all(used < oldest for _, used in _ours(folder))


def _lock(folder: Path, *, make: bool) -> int | None:
    """The lock of a folder, or None when another has it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
        flags |= os.O_CREAT
    found = folder.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return None  # somebody else put it there
    if make:
        folder.chmod(0o700)
    try:
        descriptor = os.open(folder / "lock", flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino != (folder / "lock").stat(follow_symlinks=False).st_ino:
            raise FileNotFoundError
        if make:
            os.utime(descriptor)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _ours(folder: Path) -> Iterator[tuple[Path, float]]:
    for part in sorted(folder.iterdir()):
        if len(part.name) != 2 or part.is_symlink() or not part.is_dir():
            continue
        with os.scandir(part) as entries:
            for entry in entries:
                if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield Path(entry.path), entry.stat(follow_symlinks=False).st_mtime


def _remove(folder: Path, files: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in files:
            path.unlink()
        for part in {path.parent for path in files}:
            part.rmdir()
        (folder / "lock").unlink()
        folder.rmdir()
