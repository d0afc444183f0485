"""The audit log: every way to tamper with it is found, and no crash is taken for tampering."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.state import audit
from gateway.state.audit import Actor, AuditLog, Event, Head, find_key, verify
from gateway.state.folder import StateError

KEY = b"a key of the audit tests, of at least 32 bytes"
ACTOR = Actor("admin", "api", "127.0.0.1")


def written(folder: Path, count: int = 5) -> Path:
    log = AuditLog(folder, KEY)
    for i in range(count):
        log.append(Event(ACTOR, "tenant.update", f"tenant:t{i}", {"weight": i}, {"weight": i + 1}).as_json())
    return folder / audit.LOG_FILE


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_written_is_complete_and_readable(tmp_path: Path) -> None:
    path = written(tmp_path)
    verdict = verify(path, KEY)
    assert (verdict.ok, verdict.head.seq, verdict.unsealed) == (True, 5, 0)
    entry = json.loads(lines_of(path)[1])
    assert entry["actor"] == {"name": "admin", "via": "api", "peer": "127.0.0.1"}
    assert (entry["action"], entry["before"], entry["after"]) == ("tenant.update", {"weight": 1}, {"weight": 2})
    assert [found["seq"] for found in AuditLog(tmp_path, KEY).last(2)] == [5, 4]
    for name in (audit.LOG_FILE, audit.HEAD_FILE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


Edit = Callable[[list[bytes]], list[bytes]]
TAMPERING: dict[str, tuple[Edit, str]] = {
    "edit": (lambda x: [x[0], x[1].replace(b'"weight":2', b'"weight":9'), *x[2:]], "line 2: was changed"),
    "space": (lambda x: [x[0].replace(b'":', b'": ', 1), *x[1:]], "line 1: is not written as"),
    "duplicate key": (lambda x: [b'{"seq":7,' + x[0][1:], *x[1:]], "line 1: is not written as"),
    "removal": (lambda x: [*x[:2], *x[3:]], "line 3: does not follow"),
    "first removed": (lambda x: x[1:], "line 1: does not follow"),
    "order": (lambda x: [x[1], x[0], *x[2:]], "line 1: does not follow"),
    "repetition": (lambda x: [*x[:3], x[2], *x[3:]], "line 4: does not follow"),
    "truncation": (lambda x: x[:-1], "ends at line 4, but 5 were sealed"),
    "emptied": (lambda x: [], "ends at line 0, but 5 were sealed"),
    "cut in a line": (lambda x: [*x[:-1], x[-1][:-9]], "line 5: is cut off"),
    "garbage": (lambda x: [*x[:2], b"garbage\n", *x[3:]], "line 3: is no entry"),
    "blank line": (lambda x: [*x[:2], b"\n", *x[2:]], "line 3: is no entry"),
    "forged end": (
        lambda x: [*x, x[-1].replace(b'"seq":5', b'"seq":6')],
        "line 6: was changed, or written without the key",
    ),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_every_kind_of_tampering_is_found(name: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    change, expected = TAMPERING[name]
    path.write_bytes(b"".join(change(lines_of(path))))
    problems = verify(path, KEY).problems
    assert any(problem.startswith(expected) for problem in problems), problems


def test_any_single_changed_byte_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert not verify(path, KEY).ok, at
    path.write_bytes(good)
    assert verify(path, KEY).ok


def test_one_wrong_line_is_one_problem(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"tenant:t2", b"tenant:t9"))
    assert verify(path, KEY).problems == ["line 3: was changed, or written without the key"]


def test_a_log_without_its_head_or_with_a_forged_one_is_not_complete(tmp_path: Path) -> None:
    path = written(tmp_path)
    head = tmp_path / audit.HEAD_FILE
    forged = json.loads(head.read_text()) | {"seq": 4, "mac": json.loads(lines_of(path)[3])["mac"]}
    head.write_text(json.dumps(forged))
    with pytest.raises(StateError, match="was changed"):
        verify(path, KEY)
    head.unlink()
    assert "audit.head is missing" in verify(path, KEY).problems[0]


def test_another_key_verifies_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(StateError, match="another key"):
        verify(path, b"x" * 32)


def test_a_log_that_was_put_back_with_its_head_is_known_by_a_line_noted_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    old = [(file, file.read_bytes()) for file in (path, tmp_path / audit.HEAD_FILE)]
    head = AuditLog(tmp_path, KEY).append(Event(ACTOR, "key.revoke", "key:1").as_json())
    noted = (head.seq, head.mac)
    assert verify(path, KEY, expect=noted).ok
    for file, content in old:
        file.write_bytes(content)
    assert verify(path, KEY).ok
    assert verify(path, KEY, expect=noted).problems == [
        "line 3 is not the one that was noted: the log was put back or replaced"
    ]


def test_a_crash_between_line_and_head_is_no_tampering(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    head = (tmp_path / audit.HEAD_FILE).read_bytes()
    written(tmp_path, 1)
    (tmp_path / audit.HEAD_FILE).write_bytes(head)
    verdict = verify(path, KEY)
    assert (verdict.ok, verdict.unsealed) == (True, 1)
    written(tmp_path, 1)
    assert (verify(path, KEY).ok, verify(path, KEY).head.seq) == (True, 4)


def test_half_a_line_of_a_crash_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    with path.open("ab") as file:
        file.write(b'{"action":"tenant.upd')
    written(tmp_path, 1)
    assert (verify(path, KEY).ok, verify(path, KEY).head.seq) == (True, 3)


@pytest.mark.parametrize("keep", [0, 1])
def test_a_writer_does_not_go_on_with_a_log_that_was_cut(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path, 2)
    path.write_bytes(b"".join(lines_of(path)[:keep]))
    with pytest.raises(StateError, match=rf"ends at line {keep}, its sealed head is line 2.*forebay audit verify"):
        AuditLog(tmp_path, KEY)


def test_an_entry_is_written_once_whoever_repeats_it(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, KEY)
    entry = Event(ACTOR, "key.create", "key:1").as_json()
    assert log.append(entry) == log.append(entry) == AuditLog(tmp_path, KEY).append(entry)
    assert verify(tmp_path / audit.LOG_FILE, KEY).head.seq == 1


def test_two_writers_make_one_chain(tmp_path: Path) -> None:
    one, two = AuditLog(tmp_path, KEY), AuditLog(tmp_path, KEY)
    for i in range(6):
        (one if i % 2 else two).append(Event(ACTOR, "x", str(i)).as_json())
    assert (verify(tmp_path / audit.LOG_FILE, KEY).ok, one.last(1)[0]["seq"]) == (True, 6)


def test_a_line_that_does_not_fit_the_disk_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, 1)
    log = AuditLog(tmp_path, KEY)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            log.append(Event(ACTOR, "x", "y").as_json())
    assert (verify(path, KEY).ok, verify(path, KEY).head.seq) == (True, 1)
    assert log.append(Event(ACTOR, "x", "y").as_json()).seq == 2


def test_the_key_is_the_environments_or_a_file_for_this_user_alone(tmp_path: Path) -> None:
    assert find_key(tmp_path, {audit.KEY_ENV: "k" * 32}) == b"k" * 32
    with pytest.raises(StateError, match="fewer than 32 bytes"):
        find_key(tmp_path, {audit.KEY_ENV: "short"})
    with pytest.raises(StateError, match="cannot be read"):
        find_key(tmp_path, {})
    made = find_key(tmp_path, {}, make=True)
    assert re.fullmatch(rb"[0-9a-f]{64}", made)
    assert find_key(tmp_path, {}) == find_key(tmp_path, {}, make=True) == made
    (tmp_path / audit.KEY_FILE).chmod(0o644)
    with pytest.raises(StateError, match="chmod 600"):
        find_key(tmp_path, {})


def test_an_empty_log_is_fine(tmp_path: Path) -> None:
    AuditLog(tmp_path, KEY)
    assert verify(tmp_path / audit.LOG_FILE, KEY).head == Head()
    assert AuditLog(tmp_path, KEY).last(3) == []
