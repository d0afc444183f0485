"""Blocks on a disk: a thread that writes, reads and unlinks files in the order asked, reads first.

Rules
- The engine thread hands over bytes and keys and never waits. Every write, read and unlink is reported exactly once.
- A read is answered with the very bytes that were written under its key, or with none. What is not whole is unlinked.
- Any failure of the disk costs what it holds, never a request. It is reported; trying again is the engine's business.
- Bounded: so many blocks read and not yet taken over, so many waiting to be written (the engine counts those).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from workers.engine.block_hash import BlockKey
from workers.engine.tier_desk import Found, Read, TierReport, Unlinked, Wrote
from workers.engine.tier_files import File
from workers.model import block_file
from workers.model.block_file import BadFileError
from workers.model.tier_folder import TierFolder

READ_AHEAD_BYTES = 256 * 2**20
CLOSE_S = 3.0
_BATCH = 256

_Job = Callable[[], TierReport]


class DiskTier:
    """Files of ``block_bytes`` each under ``path``, at most ``size`` bytes. ``fingerprint``: of what wrote them."""

    def __init__(self, path: Path, size: int, block_bytes: int, fingerprint: bytes, max_age_s: float) -> None:
        """Raises ValueError when not even one block fits."""
        self.files = size // block_bytes
        self.block_bytes = block_bytes
        if not self.files:
            raise ValueError(
                f"engine.tiers[1].size={size} holds no block of {block_bytes} bytes on the disk; give it that or more"
            )
        self._parent = path
        self._fingerprint = fingerprint
        self._max_age_s = max_age_s
        self._folder: TierFolder | None = None
        self._report: Callable[[TierReport], None] = lambda _: None
        self._change = threading.Condition()
        self._reads: deque[BlockKey] = deque()
        self._jobs: deque[_Job] = deque()
        self._unsaved: dict[BlockKey, bytes] = {}
        """Bytes that wait to be written."""
        self._untaken = 0
        """Blocks that were read and not taken over yet."""
        self._most_untaken = max(2, READ_AHEAD_BYTES // block_bytes)
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self, report: Callable[[TierReport], None]) -> None:
        """Start the thread, which scans first."""
        self._report = report
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)
        self._thread.start()

    def write(self, file: File, data: bytes) -> None:
        """Have a block written."""

        def job() -> TierReport:
            self._unsaved.pop(file.key, None)
            return Wrote(file.key, self._tried(lambda: self._write(file, data)))

        with self._change:
            self._unsaved[file.key] = data
            self._jobs.append(job)
            self._change.notify_all()

    def unlink(self, key: BlockKey) -> None:
        """Have a file removed."""
        with self._change:
            self._jobs.append(lambda: Unlinked(key, self._tried(lambda: self._unlink(key))))
            self._change.notify_all()

    def read(self, key: BlockKey) -> None:
        """Have a block read."""
        with self._change:
            self._reads.append(key)
            self._change.notify_all()

    def taken(self) -> None:
        """A block that was read is taken over, or dropped."""
        with self._change:
            self._untaken -= 1
            self._change.notify_all()

    def close(self) -> None:
        """Finish the writes that wait, for at most ``CLOSE_S`` seconds."""
        with self._change:
            self._closing = True
            self._reads.clear()
            self._change.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._scan()
            while (work := self._next()) is not None:
                self._report(work())
        finally:
            if self._folder is not None:
                self._folder.release()

    def _next(self) -> _Job | None:
        """What to do now; waits for it. None: the end."""
        with self._change:
            while True:
                if self._reads and self._untaken < self._most_untaken:
                    self._untaken += 1
                    key = self._reads.popleft()
                    return lambda: self._read(key)
                if self._jobs:
                    return self._jobs.popleft()
                if self._closing:
                    return None
                self._change.wait()

    def _held(self) -> TierFolder:
        """The folder; claimed when it could not be before. Raises OSError."""
        if self._folder is None:
            self._folder = TierFolder.claim(self._parent, self._fingerprint)
        return self._folder

    def _write(self, file: File, data: bytes) -> None:
        folder = self._held()
        path = folder.file(file.key)
        try:
            folder.ready(path)
        except FileNotFoundError:  # somebody removed it: the next write begins another
            folder.release()
            self._folder = None
            raise
        block_file.write(path, self._fingerprint, file, data)

    def _unlink(self, key: BlockKey) -> None:
        if self._folder is not None:
            self._folder.file(key).unlink(missing_ok=True)

    def _read(self, key: BlockKey) -> Read:
        began = time.perf_counter_ns()
        data = self._unsaved.get(key)
        found: memoryview | None = memoryview(data) if data is not None else None
        if found is None:
            try:
                path = self._held().file(key)
                found = block_file.read(path, self._fingerprint, key, self.block_bytes)
            except (OSError, BadFileError, MemoryError):
                found = None
        return Read(key, found, time.perf_counter_ns() - began)

    @staticmethod
    def _tried(act: Callable[[], None]) -> str | None:
        """Why it failed, without any name of a file."""
        try:
            act()
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, type(error).__name__)
        except MemoryError:
            return "MemoryError"
        return None

    def _scan(self) -> None:
        """Tell what is there; remove what is too old, too much, or no block of this worker's."""
        error = self._tried(lambda: self._held().sweep_others(self._max_age_s))
        kept: list[tuple[float, Path]] = []
        if self._folder is not None:
            error = self._tried(lambda: kept.extend(self._sweep(self._folder))) or error
        kept.sort()
        for path in [path for _, path in kept[: max(0, len(kept) - self.files)]]:
            self._tried(path.unlink)
        kept = kept[-self.files :]
        batch: list[File] = []
        for _, path in kept:
            header = self._header(path)
            if header is not None:
                batch.append(header)
            if len(batch) >= _BATCH:
                self._report(Found(batch))
                batch = []
            if self._closing:
                break
        self._report(Found(batch, last=True, error=error))

    def _sweep(self, folder: TierFolder | None) -> Iterable[tuple[float, Path]]:
        if folder is None:
            return
        oldest = time.time() - self._max_age_s
        for path, used in folder.files():
            if used < oldest:
                path.unlink(missing_ok=True)
            else:
                yield used, path

    def _header(self, path: Path) -> File | None:
        """What a file says of itself; None, and it is removed, when that is nothing or is over."""
        try:
            file = block_file.read_header(path, self._fingerprint, self.block_bytes).file()
        except BadFileError:
            file = None
        except OSError:
            return None
        if file is None or 0 < file.expires <= time.time():
            self._tried(lambda: os.unlink(path))
            return None
        return file
