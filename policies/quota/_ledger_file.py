"""The ledger's SQLite file: opened by one process, written by one thread (``_ledger_writer.py``), read by anybody.

Rules
- A lock file beside it names the process that owns it; a second one is refused. The lock ends with the process, so
  what an owner left open is closed at the next start: nobody is there any more who could settle it.
- The file is in WAL mode. ``synchronous=NORMAL`` survives the death of the process at any moment; ``FULL`` also that of
  the machine, for an fsync per batch.
- ``ballast`` is space put by: it is given up when the disk is full, so that what has run can still be written down.
- All of it is blocking, and belongs to the writer's thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from policies.quota import _ledger_schema as schema
from policies.quota._account import Account
from policies.quota._bucket import Bucket
from policies.quota.limits import RATES, month_of, month_start
from policies.spi import PolicyStartError

BALLAST_BYTES = 1 << 20
_PAGES_UNBOUNDED = (1 << 32) - 2
_BUSY_S = 0.5
"""How long another process (somebody with a shell) may lock the file before writing counts as failed."""
_OTHERS = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LONGEST_S = max(rate.window_s for rate in RATES.values())
_OLD_ROWS = 2000
"""Deleted at once, so that the thread is soon back."""
_FORGET = """
    DELETE FROM {table} WHERE seq IN
        (SELECT seq FROM reservations WHERE seq <= ? AND at < ? AND seq NOT IN (SELECT seq FROM open))
"""
"""Each by its own time: where the clock was wrong for a while, a row's neighbours are of another age."""


class LedgerError(PolicyStartError):
    """The ledger cannot be used; the text names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a file is kept."""

    synchronous: Literal["normal", "full"] = "normal"
    max_bytes: int | None = None
    keep_days: int = 400


class LedgerFile:
    """An open ledger. Raises LedgerError when it cannot be opened."""

    def __init__(self, path: Path, options: Options, wall: float) -> None:
        self.path = path
        self._options = options
        self._ballast = path.with_suffix(path.suffix + ".ballast")
        self._lock = _locked(path)
        try:
            self._connection = _opened(path, options)
            self._page_bytes = int(self._connection.execute("PRAGMA page_size").fetchone()[0])
            self._bound(options.max_bytes)
            self.abandoned = self._close_abandoned(wall)
            """Reservations that the last owner left open."""
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, sqlite3.Error):
                raise LedgerError(
                    f"{path}: the ledger cannot be opened ({error}); move it away or repair it"
                ) from error
            raise
        self._restore_ballast()

    def close(self) -> None:
        """Let go of it."""
        self._connection.close()
        os.close(self._lock)

    def write(self, rows: Sequence[str]) -> None:
        """Write journal rows (JSON), all or none. Raises sqlite3.Error."""
        self._connection.execute(schema.BATCH, (f"[{','.join(rows)}]",))

    def write_at_all_costs(self, rows: Sequence[str]) -> None:
        """The same beyond ``max_bytes``, and without the ballast where the disk is full. Raises sqlite3.Error."""
        self._bound(None)
        try:
            self.write(rows)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in _OTHERS or not self._ballast.exists():
                raise
            self._ballast.unlink()
            self.write(rows)
        finally:
            with contextlib.suppress(sqlite3.Error):
                self._bound(self._options.max_bytes)

    def recovered(self) -> bool:
        """Put space by anew. False: there is none, and what is left is for what has run."""
        return self._restore_ballast()

    def forget(self, wall: float) -> bool:
        """Delete some of what is too old to matter. Whether there may be more."""
        accounts, rows = self._forget_accounts(wall), self._forget_rows(wall)
        return accounts or rows

    def _forget_accounts(self, wall: float) -> bool:
        """Those that are as good as new: with limits for keys each token leaves one behind."""
        found = self._connection.execute(
            "SELECT level, tenant, name, at, rates FROM accounts WHERE at < ? LIMIT ?", (wall - _LONGEST_S, _OLD_ROWS)
        ).fetchall()
        full = [key for *key, at, rates in found if not _missing(rates, wall - at)]
        if full:
            with self._connection:
                self._connection.execute("BEGIN")
                self._connection.executemany("DELETE FROM accounts WHERE level = ? AND tenant = ? AND name = ?", full)
        return len(full) == _OLD_ROWS

    def _forget_rows(self, wall: float) -> bool:
        """Those of single requests that are older than ``keep_days``; sums stay."""
        before = wall - self._options.keep_days * 86_400.0
        newest = self._connection.execute(
            "SELECT max(seq) FROM (SELECT seq, at FROM reservations ORDER BY seq LIMIT ?) WHERE at < ?",
            (_OLD_ROWS, before),
        ).fetchone()[0]
        if newest is None:
            return False
        with self._connection:
            self._connection.execute("BEGIN")
            for table in ("settlements", "reservations"):
                self._connection.execute(_FORGET.format(table=table), (newest, before))
        return True

    def accounts(self, now: float, wall: float) -> list[Account]:
        """Every account as it was left, unless it is as good as new, and what this month cost it."""
        month = month_of(wall)
        found: dict[tuple[str, str, str], Account] = {}
        for level, tenant, name, at, rates in self._connection.execute("SELECT * FROM accounts"):
            passed = max(0.0, wall - at)
            if not _missing(rates, passed):
                continue
            buckets = {
                limit: Bucket(int(capacity), float(left), now - passed, RATES[limit].window_s)
                for limit, (capacity, left) in json.loads(rates).items()
                if limit in RATES
            }
            found[level, tenant, name] = Account((level, tenant, name), buckets=buckets, month=month)
        for key, tokens, cost in self._spent(month):
            account = found.setdefault(key, Account(key, month=month))
            account.spent["tokens"] += tokens
            account.spent["currency"] += cost
        return list(found.values())

    def _spent(self, month: int) -> Iterable[tuple[tuple[str, str, str], int, int]]:
        days = _day(month_start(month)), _day(month_start(month + 1))
        query = """
            SELECT organisation, tenant, user, sum(prompt + cached + output), sum(cost) FROM usage
            WHERE day >= ? AND day < ? GROUP BY organisation, tenant, user
        """
        for organisation, tenant, user, tokens, cost in self._connection.execute(query, days):
            yield ("tenant", tenant, tenant), tokens, cost
            if organisation:
                yield ("organisation", "", organisation), tokens, cost
            if user:
                yield ("user", tenant, user), tokens, cost

    def _close_abandoned(self, wall: float) -> int:
        ids = [row[0] for row in self._connection.execute("SELECT id FROM open")]
        for begin in range(0, len(ids), 1000):
            self.write_at_all_costs([json.dumps(["expired", name, wall]) for name in ids[begin : begin + 1000]])
        return len(ids)

    def _bound(self, max_bytes: int | None) -> None:
        pages = _PAGES_UNBOUNDED if max_bytes is None else max(1, max_bytes // self._page_bytes)
        self._connection.execute(f"PRAGMA max_page_count = {pages}")

    def _restore_ballast(self) -> bool:
        """False: for lack of space. A disk that cannot put any by for another reason has to do without."""
        if self._ballast.exists():
            return True
        try:
            descriptor = os.open(self._ballast, os.O_CREAT | os.O_WRONLY, 0o600)
        except OSError as error:
            return error.errno not in _NO_SPACE
        try:
            os.posix_fallocate(descriptor, 0, BALLAST_BYTES)
        except OSError as error:
            self._ballast.unlink()
            return error.errno not in _NO_SPACE
        finally:
            os.close(descriptor)
        return True


def read(path: Path, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of a query, on a connection of its own that cannot write. Raises LedgerError."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise LedgerError(f"{path}: the ledger cannot be read ({error})") from error


def _missing(rates: str, passed: float) -> bool:
    """Whether any of these buckets is not full again after so many seconds."""
    return any(
        left + passed * capacity / RATES[limit].window_s < capacity
        for limit, (capacity, left) in json.loads(rates).items()
        if limit in RATES
    )


def _locked(path: Path) -> int:
    """The lock's file descriptor."""
    lock = path.with_suffix(path.suffix + ".lock")
    try:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LedgerError(f"{lock} cannot be made ({error.strerror}); give the ledger a folder of its own") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise LedgerError(
            f"{path}: the ledger is in use by process {owner}. One gateway writes it: stop that one, or give this one "
            "a state.path of its own"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _opened(path: Path, options: Options) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < schema.OLDEST_SQLITE:
        wanted = ".".join(map(str, schema.OLDEST_SQLITE))
        raise LedgerError(f"the ledger needs SQLite {wanted} or newer; this Python has {sqlite3.sqlite_version}")
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _migrated(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {options.synchronous}")
        connection.execute("PRAGMA journal_size_limit = 16777216")
    except BaseException:
        connection.close()
        raise
    return connection


def _migrated(connection: sqlite3.Connection, path: Path) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if (tables and owner != schema.APPLICATION_ID) or version > schema.VERSION:
        why = "is from a newer version" if owner == schema.APPLICATION_ID else "is something else's database"
        raise LedgerError(f"{path} {why}; name another file in policies.quota.with.path")
    for number in range(version, schema.VERSION):
        connection.executescript(
            f"BEGIN; {schema.MIGRATIONS[number]}; PRAGMA application_id = {schema.APPLICATION_ID}; "
            f"PRAGMA user_version = {number + 1}; COMMIT;"
        )


def _day(wall: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(wall, UTC).date().isoformat()
