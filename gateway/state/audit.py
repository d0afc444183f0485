"""The audit log: who changed what, as a chain in which no line can be edited, removed, moved or cut off unnoticed.

One JSON object per line: ``seq``, ``at``, ``id``, ``actor``, ``action``, ``subject``, ``before``, ``after``, ``prev``
and ``mac``.

Rules
- ``mac`` is HMAC-SHA256 over the line without it, as JSON with sorted keys and no spaces; ``prev`` is that of the line
  before. Who lacks the key can neither change a line nor add one.
- ``audit.head`` seals the newest line's number and mac, so that lines missing at the end are missed.
- A line is on the disk before the head, and the head before the caller hears of it: after a crash the log may be ahead
  of its head by lines that are good; never behind.
- Half a line at the end is a write that was never acknowledged: the next writer cuts it off.
- Writers of several processes take turns by a file lock. Nothing here is called on the event loop.
- Entries hold ids, settings and figures: never content, keys or tokens (callers see to it; ``redacted`` helps).

The key is the variable ``FOREBAY_AUDIT_KEY``, else a file beside the log, made with mode 0600. In the file it keeps out
whoever may write the log but not read the key; kept elsewhere, also whoever has the folder. Only an outside witness
notices when log and head together are put back to an older copy: each head is therefore also in the process's log.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from gateway import log
from gateway.state.folder import StateError

KEY_ENV = "FOREBAY_AUDIT_KEY"
LOG_FILE = "audit.jsonl"
HEAD_FILE = "audit.head"
KEY_FILE = "audit.key"
MIN_KEY_BYTES = 32
FIRST = "0" * 64
"""``prev`` of the first line."""
MAX_PROBLEMS = 20
_TAIL_BYTES = 64 * 1024

_log = log.get("audit")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who did it."""

    name: str
    """``admin`` for the holder of the admin token, ``local`` without one, ``signal`` for SIGHUP."""
    via: str
    """``api``, ``console``, ``signal``, ``gateway``."""
    peer: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """For the log."""
        return {"name": self.name, "via": self.via, "peer": self.peer}


@dataclass(frozen=True, slots=True)
class Event:
    """One change, before it has its place in the log."""

    actor: Actor
    action: str
    """``key.create``, ``tenant.update``, ``policies.swap`` …"""
    subject: str
    """``tenant:search``, ``key:3f…``."""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))

    def as_json(self) -> dict[str, Any]:
        """Everything but its place."""
        return {
            "id": self.id,
            "at": self.at,
            "actor": self.actor.as_json(),
            "action": self.action,
            "subject": self.subject,
            "before": self.before,
            "after": self.after,
        }


@dataclass(frozen=True, slots=True)
class Head:
    """The newest line's number and mac."""

    seq: int = 0
    mac: str = FIRST


@dataclass(slots=True)
class Verdict:
    """What ``verify`` found."""

    head: Head
    problems: list[str] = field(default_factory=list)
    unsealed: int = 0
    """Good lines after the sealed head: a crash came between line and head."""

    @property
    def ok(self) -> bool:
        """Whether every line is as it was written, and none is missing."""
        return not self.problems


class AuditLog:
    """The writer. Its methods block; call them from one thread."""

    def __init__(self, folder: Path, key: bytes) -> None:
        """Raises StateError for a log that has lost lines which its head has sealed."""
        self._path = folder / LOG_FILE
        self._head_path = folder / HEAD_FILE
        self._key = key
        with self._locked() as file:
            self._catch_up(file)

    def append(self, entry: Mapping[str, Any]) -> Head:
        """Write one entry (``Event.as_json()``), once: one whose id is the newest line's is there already.

        Returns its place. Raises OSError when it is not on the disk, StateError as the constructor.
        """
        with self._locked() as file:
            head, newest = self._catch_up(file)
            if newest.get("id") == entry["id"]:
                return head
            body = {**entry, "seq": head.seq + 1, "prev": head.mac}
            mac = _mac(self._key, body)
            start = file.seek(0, os.SEEK_END)
            line = _canonical({**body, "mac": mac}) + b"\n"
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(start)
                raise
            head = Head(head.seq + 1, mac)
            self._seal(head)
        _log.info("audited", action=entry["action"], subject=entry["subject"], seq=head.seq, mac=head.mac)
        return head

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest entries, newest first; those that fit into the last part of the file."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - max(_TAIL_BYTES, count * 4096)))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    found.append(entry)
            if len(found) == count:
                break
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[io.FileIO]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _catch_up(self, file: io.FileIO) -> tuple[Head, dict[str, Any]]:
        """The newest line's place and content; a torn line is cut off. Raises StateError."""
        sealed = read_head(self._head_path, self._key)
        newest, end = _last_line(file)
        if end != file.seek(0, os.SEEK_END):
            file.truncate(end)
        head = Head(int(newest["seq"]), str(newest["mac"])) if newest else Head()
        if sealed is not None and (head.seq < sealed.seq or (head.seq == sealed.seq and head.mac != sealed.mac)):
            raise StateError(
                f"the audit log {self._path} ends at line {head.seq}, its sealed head is line {sealed.seq}: it was cut "
                f"or changed. Look with `forebay audit verify`; move {LOG_FILE} and {HEAD_FILE} away to begin a new one"
            )
        return head, newest

    def _seal(self, head: Head) -> None:
        partial = self._head_path.with_suffix(".new")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_canonical({"seq": head.seq, "mac": head.mac, "seal": _seal(self._key, head)}) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._head_path)


def find_key(folder: Path, env: Mapping[str, str], *, make: bool = False) -> bytes:
    """The log's key; ``make`` one where there is none. Raises StateError."""
    given = env.get(KEY_ENV, "")
    if given:
        if len(given.encode()) < MIN_KEY_BYTES:
            raise StateError(f"{KEY_ENV} has fewer than {MIN_KEY_BYTES} bytes; make one with: openssl rand -hex 32")
        return given.encode()
    path = folder / KEY_FILE
    if make and not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(MIN_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
    try:
        if path.stat().st_mode & 0o077:
            raise StateError(
                f"{path} can be read by others; chmod 600 it, and see who could (the log's seal rests on it)"
            )
        key = path.read_bytes().strip()
    except OSError as error:
        raise StateError(f"the audit log's key {path} cannot be read ({error.strerror}); set {KEY_ENV}") from None
    if len(key) < MIN_KEY_BYTES:
        raise StateError(f"{path} holds no key of at least {MIN_KEY_BYTES} bytes")
    return key


def verify(path: Path, key: bytes, *, expect: tuple[int, str] | None = None) -> Verdict:
    """Check every line and the head. Raises OSError when the log cannot be read, StateError for a head of another key.

    O(size of the log) time, O(1) memory. A log without a head is a problem, unless it is empty. ``expect``: number and
    mac of a line that was noted elsewhere and has to be in it.
    """
    verdict = Verdict(Head())
    seen = expect is None
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # for this moment: a gateway may go on writing behind what is looked at
        size, sealed = file.seek(0, os.SEEK_END), read_head(path.with_name(HEAD_FILE), key)
        fcntl.flock(file, fcntl.LOCK_UN)
        file.seek(0)
        for number, line in enumerate(_until(file, size), 1):
            found = _check(line, verdict.head, key)
            if found is not None:
                verdict.problems.append(f"line {number}: {found}")
                if len(verdict.problems) >= MAX_PROBLEMS:
                    return verdict
            verdict.head = _place(line, verdict.head)
            seen = seen or expect == (verdict.head.seq, verdict.head.mac)
            if sealed is not None and number > sealed.seq:
                verdict.unsealed += 1
            if sealed is not None and number == sealed.seq and verdict.head.mac != sealed.mac:
                verdict.problems.append(f"line {number}: is not the one that the head has sealed")
    lines = verdict.head.seq
    if sealed is None and lines:
        verdict.problems.append(f"{HEAD_FILE} is missing: lines may be missing at the end")
    elif sealed is not None and lines < sealed.seq:
        verdict.problems.append(f"ends at line {lines}, but {sealed.seq} were sealed: the end was cut off")
    if expect is not None and not seen:
        verdict.problems.append(f"line {expect[0]} is not the one that was noted: the log was put back or replaced")
    return verdict


def _until(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The lines of the first ``size`` bytes."""
    while file.tell() < size and (line := file.readline()):
        yield line


def _check(line: bytes, before: Head, key: bytes) -> str | None:
    """What is wrong with a line, if anything."""
    if not line.endswith(b"\n"):
        return "is cut off in the middle"
    try:
        entry = json.loads(line)
        body = {name: value for name, value in entry.items() if name != "mac"}
        mac, seq, prev = str(entry["mac"]), entry["seq"], entry["prev"]
    except (ValueError, AttributeError, KeyError, RecursionError):
        return "is no entry"
    if _canonical(entry) + b"\n" != line:
        return "is not written as this log writes"
    if not hmac.compare_digest(mac, _mac(key, body)):
        return "was changed, or written without the key"
    if seq != before.seq + 1 or prev != before.mac:
        return f"does not follow the line before (it is number {seq}): lines were removed, added or moved"
    return None


def _place(line: bytes, before: Head) -> Head:
    """Where a line stands by its own account; so that one wrong line is one problem."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        entry = json.loads(line)
        return Head(int(entry["seq"]), str(entry["mac"]))
    return Head(before.seq + 1, before.mac)


def read_head(path: Path, key: bytes) -> Head | None:
    """The sealed head; None where there is none. Raises StateError for one that was not sealed with this key."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from None
    try:
        found = json.loads(text)
        head, seal = Head(int(found["seq"]), str(found["mac"])), str(found["seal"])
    except (ValueError, KeyError, TypeError):
        head, seal = Head(), ""
    if not hmac.compare_digest(seal.encode(), _seal(key, head).encode()):
        raise StateError(f"{path} was changed, or sealed with another key than this one")
    return head


def _last_line(file: io.FileIO) -> tuple[dict[str, Any], int]:
    """The last whole line's entry (empty: none) and where it ends. Raises StateError for one that is no entry."""
    end = file.seek(0, os.SEEK_END)
    start, tail = end, b""
    while start > 0 and tail.count(b"\n") < 2:
        step = min(_TAIL_BYTES, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    whole = tail.rfind(b"\n") + 1
    if not whole:
        return {}, end - len(tail)
    line = tail[:whole].splitlines()[-1]
    try:
        entry = json.loads(line)
        int(entry["seq"]), str(entry["mac"])
    except (ValueError, KeyError, TypeError):
        raise StateError("the audit log's last line is no entry; look with `forebay audit verify`") from None
    return entry, end - len(tail) + whole


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _mac(key: bytes, body: Mapping[str, Any]) -> str:
    return hmac.new(key, b"line\0" + _canonical(body), hashlib.sha256).hexdigest()


def _seal(key: bytes, head: Head) -> str:
    return hmac.new(key, f"head\0{head.seq}\0{head.mac}".encode(), hashlib.sha256).hexdigest()
