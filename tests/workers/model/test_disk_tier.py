"""Files of the disk tier: written whole, read whole or not at all, bounded, private, and gone when they must be."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.block_hash import BlockKey
from workers.engine.block_pool import Holding
from workers.engine.tier_desk import Found, Read, TierReport, Unlinked, Wrote
from workers.engine.tier_files import File
from workers.model import block_file, tier_folder
from workers.model.block_file import BadFileError
from workers.model.disk_tier import DiskTier

SIZE = 1000
PRINT = bytes(range(32))


def file(number: int, **fields: float) -> File:
    holding = Holding(b"scope%d" % number, "owner", 2.0, frozenset({b"doc", b"user"}))
    return File(BlockKey(bytes([number]) * 32), holding, **fields)


def data(number: int) -> bytes:
    return bytes([number, number + 1]) * (SIZE // 2)


class Disk:
    """A tier and what it reported."""

    def __init__(self, path: Path, *, size: int = 100 * SIZE, print_: bytes = PRINT, max_age_s: float = 1e6) -> None:
        self.reports: SimpleQueue[TierReport] = SimpleQueue()
        self.tier = DiskTier(path, size, SIZE, print_, max_age_s)
        self.tier.begin(self.reports.put)
        self.found: list[File] = []
        self.error: str | None = None
        while True:
            report = self.next()
            assert isinstance(report, Found)
            self.found += report.files
            self.error = report.error
            if report.last:
                break

    def next(self) -> TierReport:
        return self.reports.get(timeout=30)

    def write(self, number: int, **fields: float) -> Wrote:
        self.tier.write(file(number, **fields), data(number))
        report = self.next()
        assert isinstance(report, Wrote)
        return report

    def read(self, number: int) -> bytes | None:
        self.tier.read(file(number).key)
        report = self.next()
        assert isinstance(report, Read)
        assert report.key == file(number).key
        self.tier.taken()
        return None if report.data is None else bytes(report.data)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    made: list[Disk] = []

    def make(**fields: object) -> Disk:
        made.append(Disk(tmp_path / "kv", **fields))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.tier.close()


def paths(root: Path) -> list[Path]:
    return sorted(root.glob("kv/*/*/*.kv"))


def test_what_is_written_is_read(disk: Callable[..., Disk]) -> None:
    one = disk()
    assert one.write(3).error is None
    assert one.read(3) == data(3)
    assert one.read(4) is None
    one.tier.unlink(file(3).key)
    assert one.next() == Unlinked(file(3).key)
    assert one.read(3) is None


def test_a_read_before_the_write_was_done_gives_the_same(disk: Callable[..., Disk]) -> None:
    """Reads come first; what waits to be written is answered from memory."""
    one = disk()
    for number in range(20):
        one.tier.write(file(number), data(number))
    for number in range(20):
        one.tier.read(file(number).key)
    reports = [one.next() for _ in range(40)]
    got = {report.key: bytes(report.data or b"") for report in reports if isinstance(report, Read)}
    assert got == {file(number).key: data(number) for number in range(20)}
    assert sum(isinstance(report, Wrote) for report in reports) == 20


def test_a_restart_finds_the_files_longest_unused_first(disk: Callable[..., Disk], tmp_path: Path) -> None:
    one = disk()
    for number in range(5):
        assert one.write(number, expires=4e9).error is None
    one.tier.close()
    for age, path in enumerate(paths(tmp_path)):
        os.utime(path, (1, time.time() - 100 + age))
    two = disk()
    assert two.found == [file(number, expires=4e9) for number in range(5)]
    assert two.read(2) == data(2)
    two.tier.close()
    assert [one.key for one in disk().found][-1] == file(2).key, "reading is using"


def test_another_format_model_or_layout_is_not_met(disk: Callable[..., Disk]) -> None:
    one = disk()
    one.write(1)
    one.tier.close()
    other = disk(print_=bytes(32))
    assert other.found == []
    assert other.read(1) is None


def test_a_worker_that_runs_beside_has_files_of_its_own(disk: Callable[..., Disk], tmp_path: Path) -> None:
    one, two = disk(), disk()
    one.write(1)
    two.write(2)
    assert two.read(1) is None
    assert len({path.parent.parent for path in paths(tmp_path)}) == 2
    two.tier.close()
    assert [found.key for found in disk().found] == [file(2).key]


def test_files_and_folders_are_the_users_own(disk: Callable[..., Disk], tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        one = disk()
        one.write(1)
    finally:
        os.umask(old)
    for path in (tmp_path / "kv").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_the_oldest_go_when_the_disk_became_smaller(disk: Callable[..., Disk], tmp_path: Path) -> None:
    one = disk()
    for number in range(6):
        one.write(number)
    one.tier.close()
    for age, path in enumerate(paths(tmp_path)):
        os.utime(path, (1, time.time() - 100 + age))
    two = disk(size=2 * SIZE)
    assert [found.key for found in two.found] == [file(4).key, file(5).key]
    assert len(paths(tmp_path)) == 2


def test_what_is_too_old_or_over_goes_at_the_start(disk: Callable[..., Disk], tmp_path: Path) -> None:
    """Files of epochs that ended while the worker was down are such."""
    one = disk()
    one.write(1)
    one.write(2, expires=time.time() - 1)
    one.write(3)
    one.tier.close()
    os.utime(paths(tmp_path)[0], (1, time.time() - 50))
    two = disk(max_age_s=20)
    assert [found.key for found in two.found] == [file(3).key]
    assert len(paths(tmp_path)) == 1


def test_folders_of_other_models_go_when_they_are_old(disk: Callable[..., Disk], tmp_path: Path) -> None:
    one = disk(print_=bytes(32))
    one.write(1)
    one.tier.close()
    (tmp_path / "kv" / "mine").mkdir()
    (tmp_path / "kv" / "mine" / "notes.txt").write_text("keep")
    disk(max_age_s=1000)
    assert len(paths(tmp_path)) == 1
    for path in (*paths(tmp_path), *(tmp_path / "kv").glob("0000*/lock")):
        os.utime(path, (1, 1))
    disk(max_age_s=1000)
    assert paths(tmp_path) == []
    assert not list((tmp_path / "kv").glob("0000*"))
    assert (tmp_path / "kv" / "mine" / "notes.txt").read_text() == "keep"


def test_a_folder_used_lately_is_not_locked_by_anothers_sweep(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of two models that start at once: each finds its own files, whoever sweeps first."""
    theirs = bytes(32)
    one = disk(print_=theirs)
    one.write(1)
    one.tier.close()
    asked: list[str] = []
    lock = tier_folder._lock

    def noted(folder: Path, *, make: bool) -> int | None:
        asked.extend([] if make else [folder.name])
        return lock(folder, make=make)

    monkeypatch.setattr(tier_folder, "_lock", noted)
    disk(print_=bytes([1]) * 32)
    assert asked == []


@pytest.mark.parametrize("cut", [0, 5, 30, 200, -1])
def test_a_file_that_was_cut_off_is_a_miss(disk: Callable[..., Disk], tmp_path: Path, cut: int) -> None:
    one = disk()
    one.write(1)
    path = paths(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:cut])
    assert one.read(1) is None
    one.tier.close()
    assert disk().found == []
    assert paths(tmp_path) == [], "it is removed"


def pickled(whole: bytes) -> bytes:
    return pickle.dumps({"scope": whole, "run": print}).ljust(len(whole), b".")


def of_another_version(whole: bytes) -> bytes:
    return whole[: len(block_file.MAGIC) - 1] + bytes([block_file.MAGIC[-1] + 1]) + whole[len(block_file.MAGIC) :]


@pytest.mark.parametrize("harm", [pickled, of_another_version])
def test_bytes_of_another_format_are_a_miss(
    disk: Callable[..., Disk], tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    """security 61: under a key that is looked for, and at a start."""
    one = disk()
    one.write(1)
    path = paths(tmp_path)[0]
    path.write_bytes(harm(path.read_bytes()))
    assert one.read(1) is None
    assert one.write(2).error is None
    assert one.read(2) == data(2)
    one.tier.close()
    assert [found.key for found in disk().found] == [file(2).key]


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_bit_may_be_another(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    """Anywhere: then it is a miss, never other bytes."""
    path = tmp_path_factory.mktemp("bits") / f"{file(1).key.hex()}.kv"
    block_file.write(path, PRINT, file(1), data(1))
    whole = bytearray(path.read_bytes())
    whole[place % len(whole)] ^= 1 << bit
    path.write_bytes(whole)
    with pytest.raises(BadFileError):
        block_file.read(path, PRINT, file(1).key, SIZE)


def test_a_file_under_another_name_is_a_miss(disk: Callable[..., Disk], tmp_path: Path) -> None:
    """security: a tenant's file put where another's is looked for."""
    one = disk()
    one.write(1)
    source = paths(tmp_path)[0]
    name = file(9).key.hex()
    target = source.parent.parent / name[:2] / f"{name}.kv"
    target.parent.mkdir()
    target.write_bytes(source.read_bytes())
    assert one.read(9) is None
    one.tier.close()
    assert [found.key for found in disk().found] == [file(1).key]


def test_a_folder_that_is_a_link_is_not_used(disk: Callable[..., Disk], tmp_path: Path) -> None:
    """security: whoever can write to the parent must not choose where tenants' data goes."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / f"{PRINT.hex()[:16]}-0").symlink_to(elsewhere)
    one = disk()
    assert one.write(1).error is None
    assert one.read(1) == data(1)
    assert not list(elsewhere.iterdir())
    assert elsewhere.stat().st_mode & 0o777 == 0o755


def test_a_link_is_not_followed(disk: Callable[..., Disk], tmp_path: Path) -> None:
    one = disk()
    one.write(1)
    path = paths(tmp_path)[0]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert one.read(1) is None


def test_a_full_disk_is_reported_and_leaves_nothing(
    disk: Callable[..., Disk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = disk()
    one.write(1)

    def full(descriptor: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(block_file.os, "write", full)
        assert one.write(2) == Wrote(file(2).key, "ENOSPC")
    assert [path.suffix for path in (tmp_path / "kv").rglob("*.*")] == [".kv"]
    assert one.read(1) == data(1)
    assert one.write(2).error is None


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    one = Disk(tmp_path / "kv")
    try:
        assert one.error is not None
        assert one.write(1).error is not None
        assert one.read(1) is None
        (tmp_path / "kv").unlink()
        assert one.write(1).error is None, "it is tried again"
        assert one.read(1) == data(1)
    finally:
        one.tier.close()


def test_a_folder_that_was_removed_is_made_again(disk: Callable[..., Disk], tmp_path: Path) -> None:
    """What was in it is a miss, one write is lost, the next begins anew."""
    one = disk()
    one.write(1)
    shutil.rmtree(tmp_path / "kv")
    assert one.read(1) is None
    assert one.write(2).error == "ENOENT"
    assert one.write(3).error is None
    assert one.read(3) == data(3)


def test_a_lock_on_a_removed_file_holds_nothing(
    disk: Callable[..., Disk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's sweep removed the folder between the opening of its lock and the locking."""
    lock, gone = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not gone:
            gone.append(descriptor)
            shutil.rmtree(tmp_path / "kv" / f"{PRINT.hex()[:16]}-0")
        lock(descriptor, operation)

    monkeypatch.setattr(tier_folder.fcntl, "flock", late)
    one = disk()
    assert gone
    assert one.write(1).error is None
    assert one.read(1) == data(1)


def test_closing_writes_what_waits(disk: Callable[..., Disk]) -> None:
    one = disk()
    for number in range(30):
        one.tier.write(file(number), data(number))
    one.tier.close()
    assert len(disk().found) == 30


def test_killed_while_it_writes(disk: Callable[..., Disk], tmp_path: Path) -> None:
    """What is there afterwards is whole; what was half done is removed."""
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.workers.model.test_disk_tier import Disk, data, file\n"
        "one = Disk(Path(sys.argv[1]))\n"
        "while True:\n"
        "    for number in range(40): one.tier.write(file(number), data(number))\n"
        "    for _ in range(40): one.next()\n"
        "    print('round', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "kv")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "round\n"
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    next(iter((tmp_path / "kv").glob("*/*"))).parent.joinpath("01").mkdir(exist_ok=True)
    (paths(tmp_path)[0].with_suffix(".tmp")).write_bytes(b"half")
    one = disk()
    assert len(one.found) == 40
    for number in range(40):
        assert one.read(number) == data(number)
    assert not list((tmp_path / "kv").rglob("*.tmp"))


def test_a_disk_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"size=10 holds no block of 1000 bytes"):
        DiskTier(tmp_path, 10, SIZE, PRINT, 1.0)
