"""The one writer of tenants, keys and the audit log: changes are live, durable and audited before they are answered.

Rules
- What thousands of keys cost to be read and indexed is the thread's too; a changed key makes nobody's tenants anew.
- Changes are made one after another, in one thread of their own; the event loop never waits for the disk.
- A change is committed together with its audit entry (``store.py``), then in force, then in the log. An entry that the
  log does not take (a full disk) is tried again every ``POLL_S``; it is lost at no time.
- A change is thought out over what is in the file: where another gateway wrote meanwhile, it is thought out again. So
  neither a merge patch nor a rotation takes back what the other one did (a revocation, say).
- Other gateways that share the folder see a change within ``POLL_S`` + its read: a revoked key ends everywhere.
- Without ``state.path`` there is nothing to write to: changes are refused with 409, ``record`` does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gateway import log
from gateway.errors import ApiError
from gateway.state.audit import Actor, AuditLog, Event, find_key
from gateway.state.records import Entries, KeyDirectory, KeyRecord, Secret
from gateway.state.store import ChangedMeanwhile, Snapshot, Store
from policies.auth.api_key import digest_of, key_prefix, make_key

_log = log.get("state")

POLL_S = 1.0
MAX_OVERLAP_S = 30 * 86_400.0

_ATTEMPTS = 100
"""Each one that fails is somebody else's change that was written."""

T = TypeVar("T")
Write = Callable[[Store], None]


@dataclass(frozen=True, slots=True)
class NewKey:
    """What a key is made for."""

    tenant: str
    user: str | None = None
    groups: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    name: str | None = None
    expires_at: float | None = None


class Registrar:
    """See the module's rules. Belongs to the event loop, but for what it runs in its thread."""

    def __init__(
        self, folder: Path | None, keys: KeyDirectory, env: Mapping[str, str], clock: Callable[[], float] = time.time
    ) -> None:
        """Opens the files, and reads them. Raises StateError."""
        self._keys = keys
        self._clock = clock
        self._snapshot = Snapshot()
        self._on_change: Callable[[], None] = lambda: None
        self._changing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._store: Store | None = None
        if folder is not None:
            self._audit = AuditLog(folder, find_key(folder, env, make=True))
            self._store = Store(folder)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
            self._seen = self._store.version()
            self._snapshot = self._store.snapshot()
            keys.replace(self._snapshot.keys.values())

    @property
    def kept(self) -> bool:
        """Whether anything is kept here at all."""
        return self._store is not None

    @property
    def tenants(self) -> Mapping[str, Mapping[str, Any]]:
        """What was set of each tenant through the admin API."""
        return self._snapshot.tenants

    @property
    def keys(self) -> Mapping[str, KeyRecord]:
        """All keys by id, oldest first, revoked ones too."""
        return self._snapshot.keys

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin to look for other gateways' changes. ``on_change``: called on the loop when tenants have changed."""
        self._on_change = on_change
        if self._store is not None:
            self._watching = asyncio.create_task(self._watch(), name="state watch")

    async def stop(self) -> None:
        """End the thread and close the files. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if self._thread is not None and self._store is not None:
            await self._run(self._flush)
            await self._run(self._store.close)
            self._thread.shutdown()
            self._thread = self._store = None

    # -- changes --------------------------------------------------------------------------------------------------

    async def create_key(self, actor: Actor, new: NewKey) -> tuple[KeyRecord, str]:
        """Make a key. The secret is returned here and nowhere else, ever."""
        now = self._clock()
        secret, kept = _new_secret(now)
        key = KeyRecord(
            id=secrets.token_hex(6),
            tenant=new.tenant,
            created_at=now,
            user=new.user,
            groups=new.groups,
            roles=new.roles,
            name=new.name,
            expires_at=new.expires_at,
            secrets=(kept,),
        )
        event = Event(actor, "key.create", f"key:{key.id}", after=key.as_json(now))
        await self._change(lambda: (key, lambda store: store.put_key(key, event)))
        return key, secret

    async def rotate_key(self, actor: Actor, key_id: str, overlap_s: float) -> tuple[KeyRecord, str]:
        """Give a key a new secret; the ones before pass for ``overlap_s`` seconds more.

        Raises ApiError: 404 unknown key, 409 one that is revoked or expired.
        """
        now = self._clock()
        secret, kept = _new_secret(now)

        def rotated() -> tuple[KeyRecord, Write]:
            old, end = self._active(key_id, now), now + overlap_s
            ending = [
                item if item.ends_at is not None and item.ends_at < end else replace(item, ends_at=end)
                for item in old.secrets
                if item.ends_at is None or item.ends_at > now
            ]
            key = replace(old, secrets=(*ending, kept))
            event = Event(actor, "key.rotate", f"key:{key_id}", old.as_json(now), key.as_json(now))
            return key, lambda store: store.put_key(key, event)

        return await self._change(rotated), secret

    async def revoke_key(self, actor: Actor, key_id: str) -> KeyRecord:
        """End a key at once. Idempotent. Raises ApiError 404."""

        def revoked() -> tuple[KeyRecord, Write | None]:
            now, old = self._clock(), self._known(key_id)
            if old.revoked_at is not None:
                return old, None
            key = replace(old, revoked_at=now)
            event = Event(actor, "key.revoke", f"key:{key_id}", old.as_json(now), key.as_json(now))
            return key, lambda store: store.put_key(key, event)

        return await self._change(revoked)

    async def change_tenant(
        self,
        actor: Actor,
        action: str,
        tenant: str,
        work: Callable[[Mapping[str, Any] | None], Mapping[str, Any] | None],
        *,
        revoke_keys: bool = False,
    ) -> None:
        """Replace what is kept of a tenant by what ``work`` makes of it (None: nothing); what it raises goes through.

        ``revoke_keys``: with nothing left of the tenant its keys end too. ``work`` may be asked more than once.
        """

        def changed() -> tuple[None, Write]:
            old = self._snapshot.tenants.get(tenant)
            new = work(old)
            event = Event(actor, action, f"tenant:{tenant}", old, new)
            if new is not None:
                return None, lambda store: store.put_tenant(tenant, new, event)
            end = self._clock() if revoke_keys else None
            return None, lambda store: store.delete_tenant(tenant, end, event)

        await self._change(changed)

    async def record(self, event: Event) -> None:
        """Put something in the log that was done elsewhere (a swap, a purge); it waits where the log does not take it.

        A failure is logged: the deed is done.
        """
        store = self._store
        if store is None:
            return
        try:
            await self._run(partial(store.note, event))
            await self._run(self._flush)
        except (OSError, ValueError) as error:
            _log.error("audit_failed", action=event.action, subject=event.subject, why=str(error))

    async def last_events(self, count: int) -> list[dict[str, Any]]:
        """The newest entries of the audit log, newest first. Raises ApiError 409 where there is none."""
        if self._store is None:
            raise state_required()
        return await self._run(lambda: self._audit.last(count))

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _change(self, plan: Callable[[], tuple[T, Write | None]]) -> T:
        """``plan`` says what to answer and what to write (None: nothing), by what is in the file. What it raises goes
        through.
        """
        store = self._store
        if store is None:
            raise state_required()
        async with self._changing:
            for _ in range(_ATTEMPTS):
                await self._refresh()
                answer, write = plan()
                with contextlib.suppress(ChangedMeanwhile):
                    if write is not None:
                        await self._apply(partial(write, store))
                    return answer
        raise _not_written(OSError("other gateways write all the time"))

    async def _apply(self, write: Callable[[], None]) -> None:
        """Commit, put in force, log. Shielded: a caller that hangs up leaves nothing half done."""

        async def work() -> None:
            try:
                await self._run(write)
            except OSError as error:
                raise _not_written(error) from error
            await self._refresh(always=True)
            await self._run(self._flush)

        task = asyncio.create_task(work(), name="state change")
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})  # the next change must find this one done
            raise

    async def _refresh(self, *, always: bool = False) -> None:
        store = self._store
        assert store is not None

        def read() -> tuple[Snapshot, Entries] | None:
            version = store.version()
            if version == self._seen and not always:
                return None
            self._seen = version
            snapshot = store.snapshot()
            return snapshot, KeyDirectory.made(snapshot.keys.values())

        found = await self._run(read)
        if found is not None:
            tenants = self._snapshot.tenants
            self._snapshot, entries = found
            self._keys.take(entries)
            if self._snapshot.tenants != tenants:
                self._on_change()

    def _flush(self) -> None:
        """Bring what is pending into the log. In the thread."""
        assert self._store is not None
        try:
            self._store.hand_on(self._audit.append)
        except (OSError, ValueError, sqlite3.Error) as error:
            _log.error("audit_delayed", why=str(error))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                async with self._changing:
                    await self._refresh()
                    await self._run(self._flush)
            except Exception as error:
                _log.error("state_not_read", failure=log.describe(error))

    async def _run(self, work: Callable[[], T]) -> T:
        """In the thread; SQLite's errors come out as OSError."""

        def translated() -> T:
            try:
                return work()
            except sqlite3.Error as error:
                raise OSError(str(error)) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, translated)

    def _known(self, key_id: str) -> KeyRecord:
        key = self._snapshot.keys.get(key_id)
        if key is None:
            raise ApiError(404, "There is no such key.", type="invalid_request_error", code="unknown_key", param="key")
        return key

    def _active(self, key_id: str, now: float) -> KeyRecord:
        key = self._known(key_id)
        if (state := key.state(now)) != "active":
            raise ApiError(
                409, f"The key is {state}; make a new one.", type="invalid_request_error", code=f"key_{state}"
            )
        return key


def state_required() -> ApiError:
    """409: nothing is kept here."""
    return ApiError(
        409,
        "This gateway keeps no state: set state.path in its configuration to a folder, and restart it.",
        type="invalid_request_error",
        code="state_required",
        param="state.path",
    )


def _not_written(error: OSError) -> ApiError:
    _log.error("state_not_written", why=str(error))
    return ApiError(
        503,
        "Nothing was changed: the state cannot be written now. The gateway's log says why.",
        type="service_unavailable",
        code="state_unavailable",
        retry_after_s=5.0,
    )


def _new_secret(now: float) -> tuple[str, Secret]:
    secret = make_key()
    return secret, Secret(digest_of(secret), key_prefix(secret), now)
