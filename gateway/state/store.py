"""Tenants and keys that the admin API made, in SQLite: ``identity.sqlite3`` below ``state.path``.

Rules
- Every change is one transaction, on the disk before the caller hears of it (WAL, synchronous=FULL), and it holds the
  entry for the audit log too: no change is ever without one, wherever a crash comes. ``pending`` entries are deleted
  once they are in the log.
- Several gateways may share the file; each sees the others' changes by ``version``. A change that was thought out over
  an older state than the file's is refused (``ChangedMeanwhile``): written, it would undo what another gateway did.
- Pending entries are handed on one at a time, under the file's lock: two gateways never enter one twice.
- Methods block: call them from one thread (``registrar.py`` does), never from the event loop.
- ``user_version`` is the schema's; a file of a newer release is refused, an older one is brought forward.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.state.audit import Event
from gateway.state.folder import StateError
from gateway.state.records import KeyRecord, Secret

FILE = "identity.sqlite3"
SCHEMA = 1
BUSY_S = 5.0

_CREATE = """
CREATE TABLE tenants (id TEXT PRIMARY KEY, config TEXT NOT NULL) STRICT;
CREATE TABLE keys (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, user TEXT, groups TEXT NOT NULL, roles TEXT NOT NULL, name TEXT,
    created_at REAL NOT NULL, expires_at REAL, revoked_at REAL
) STRICT;
CREATE TABLE secrets (
    digest BLOB PRIMARY KEY, key TEXT NOT NULL REFERENCES keys (id), prefix TEXT NOT NULL,
    created_at REAL NOT NULL, ends_at REAL
) STRICT;
CREATE INDEX secrets_by_key ON secrets (key);
CREATE TABLE pending (number INTEGER PRIMARY KEY, entry TEXT NOT NULL) STRICT;
PRAGMA user_version = 1;
"""


class ChangedMeanwhile(Exception):  # noqa: N818 - no error: whoever wanted to write looks again
    """Another gateway has written since the last ``snapshot``."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything in the store."""

    tenants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the admin API set of each, in the shape of the YAML's ``tenants[]``, without ``id``."""
    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    """By id, oldest first."""


class Store:
    """One connection."""

    def __init__(self, folder: Path) -> None:
        """Open, make or bring forward. Raises StateError."""
        self.path = folder / FILE
        try:
            if not self.path.exists():
                self.path.touch(mode=0o600)
            self._db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"state.path: {self.path} cannot be opened ({error})") from None
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._migrate()
            self._as_of: int | None = None
            """The version that the last snapshot shows."""
        except sqlite3.Error as error:
            self._db.close()
            raise StateError(f"state.path: {self.path} is not usable ({error})") from None
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close. Idempotent."""
        self._db.close()

    def version(self) -> int:
        """Differs from what it was when another connection has changed the file."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def snapshot(self) -> Snapshot:
        """Everything, as of one moment."""
        with self._transaction("DEFERRED"):
            tenants = {name: json.loads(text) for name, text in self._db.execute("SELECT id, config FROM tenants")}
            secrets: dict[str, list[Secret]] = {}
            rows = self._db.execute("SELECT key, digest, prefix, created_at, ends_at FROM secrets ORDER BY created_at")
            for key, *rest in rows:
                secrets.setdefault(key, []).append(Secret(*rest))
            keys = {
                row[0]: KeyRecord(
                    id=row[0],
                    tenant=row[1],
                    user=row[2],
                    groups=tuple(json.loads(row[3])),
                    roles=tuple(json.loads(row[4])),
                    name=row[5],
                    created_at=row[6],
                    expires_at=row[7],
                    revoked_at=row[8],
                    secrets=tuple(secrets.get(row[0], ())),
                )
                for row in self._db.execute(
                    "SELECT id, tenant, user, groups, roles, name, created_at, expires_at, revoked_at FROM keys "
                    "ORDER BY created_at, id"
                )
            }
            self._as_of = self.version()
        return Snapshot(tenants, keys)

    # -- changes: raise ChangedMeanwhile where the last snapshot is not what is in the file ---------------------------

    def put_key(self, key: KeyRecord, event: Event) -> None:
        """Add a key, or replace one and its secrets."""
        with self._change(event):
            self._db.execute("DELETE FROM secrets WHERE key = ?", (key.id,))
            self._db.execute(
                "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
                "expires_at = excluded.expires_at, revoked_at = excluded.revoked_at",
                (
                    key.id,
                    key.tenant,
                    key.user,
                    json.dumps(key.groups),
                    json.dumps(key.roles),
                    key.name,
                    key.created_at,
                    key.expires_at,
                    key.revoked_at,
                ),
            )
            self._db.executemany(
                "INSERT INTO secrets VALUES (?, ?, ?, ?, ?)",
                [(secret.digest, key.id, secret.prefix, secret.created_at, secret.ends_at) for secret in key.secrets],
            )

    def put_tenant(self, tenant: str, config: Mapping[str, Any], event: Event) -> None:
        """Set what is kept of a tenant."""
        with self._change(event):
            self._db.execute(
                "INSERT INTO tenants VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET config = excluded.config",
                (tenant, json.dumps(config)),
            )

    def delete_tenant(self, tenant: str, revoked_at: float | None, event: Event) -> None:
        """Forget what is kept of a tenant; its keys are revoked where a time is given."""
        with self._change(event):
            self._db.execute("DELETE FROM tenants WHERE id = ?", (tenant,))
            if revoked_at is not None:
                self._db.execute(
                    "UPDATE keys SET revoked_at = ? WHERE tenant = ? AND revoked_at IS NULL", (revoked_at, tenant)
                )

    # -- the audit log's outbox -------------------------------------------------------------------------------------

    def note(self, event: Event) -> None:
        """Something that was done elsewhere. Raises ValueError for what is no JSON."""
        with self._transaction("IMMEDIATE"):
            self._note(event)

    def pending(self) -> int:
        """How many entries are not known to be in the log."""
        return int(self._db.execute("SELECT count(*) FROM pending").fetchone()[0])

    def hand_on(self, append: Callable[[Mapping[str, Any]], object]) -> None:
        """Give them to ``append``, oldest first. What it raises goes through, and its entry stays."""
        while self.pending():
            with self._transaction("IMMEDIATE"):
                row = self._db.execute("SELECT number, entry FROM pending ORDER BY number LIMIT 1").fetchone()
                if row is None:  # another gateway was quicker
                    return
                append(json.loads(row[1]))
                self._db.execute("DELETE FROM pending WHERE number = ?", (row[0],))

    # -- inside -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _change(self, event: Event) -> Iterator[None]:
        with self._transaction("IMMEDIATE"):
            if self._as_of is not None and self.version() != self._as_of:
                raise ChangedMeanwhile
            yield
            self._note(event)

    def _note(self, event: Event) -> None:
        self._db.execute("INSERT INTO pending (entry) VALUES (?)", (json.dumps(event.as_json(), allow_nan=False),))

    @contextlib.contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk may have rolled back already
                self._db.execute("ROLLBACK")
            raise

    def _migrate(self) -> None:
        with self._transaction("IMMEDIATE"):
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found > SCHEMA:
                raise StateError(
                    f"state.path: {self.path} was written by a newer release (schema {found}, this one knows {SCHEMA})"
                )
            if found < 1:
                for statement in _CREATE.split(";\n"):
                    self._db.execute(statement)
