"""Compiling once: under a lock, whole or not at all, anew if damaged, and a clear reason when it cannot be done."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests import kernels
from workers.model.native import build


@pytest.fixture
def compiler_that_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that counts its calls and writes a tiny file; compiling for real is test_kernel.py's business."""
    script, log = tmp_path / "cxx", tmp_path / "calls"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\necho call >> {log}\nsleep 0.3\n'
        'while [ "$1" != -o ]; do shift; done\necho built > "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    return log


def test_processes_starting_together_compile_once(compiler_that_logs: Path) -> None:
    command = [sys.executable, "-c", "from workers.model.native.build import library; print(library())"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0].strip() for process in started}
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes().startswith(b"built\n")
    assert compiler_that_logs.read_text() == "call\n"


def test_whoever_can_read_the_cache_can_read_the_kernel(compiler_that_logs: Path) -> None:
    """An image is made by one user and runs as another; its digest is read."""
    assert stat.S_IMODE(build.library().stat().st_mode) == 0o755


def _spoil(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "cut off": content[:middle],
        "empty": b"",
        "another bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "longer": content + b"\0",
    }[how]


@pytest.mark.parametrize("how", ["cut off", "empty", "another bit", "longer"])
def test_a_damaged_one_is_built_anew(compiler_that_logs: Path, how: str) -> None:
    place = build.library()
    whole = place.read_bytes()
    place.write_bytes(_spoil(whole, how))
    assert build.library() == place
    assert place.read_bytes() == whole
    assert compiler_that_logs.read_text() == "call\n" * 2


def test_a_kernel_that_was_cut_off_ends_no_worker(tmp_path: Path) -> None:
    """Mapping it would: the system raises SIGBUS for pages that a file should have and has not."""
    with kernels.form("avx2"):
        whole = build.library()
    script = tmp_path / "cxx"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\n'
        f'while [ "$1" != -o ]; do shift; done\ncp {whole} "$2"\n'
    )
    script.chmod(0o755)
    env = {**os.environ, "CXX": str(script), "FOREBAY_CACHE": str(tmp_path / "cache")}
    program = "from workers.model.native import build; print(build.library()); print(build.load().fb_isa().decode())"

    def load() -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (done.returncode, done.stderr[-500:])
        place, isa = done.stdout.split()
        return place, isa

    place, isa = load()
    assert isa == "avx2"
    os.truncate(place, Path(place).stat().st_size // 16)
    assert load() == (place, isa)


def test_the_name_follows_the_flags(compiler_that_logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library()
    monkeypatch.setenv("FOREBAY_NATIVE_MARCH", "x86-64-v3")
    build._key.cache_clear()
    assert build.library() != first


def test_a_kernel_for_a_kind_of_machine_is_found_on_another(
    compiler_that_logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that an image brings. One for this very machine is not."""
    found = []
    for flag in ("x86-64-v3", "native"):
        monkeypatch.setenv("FOREBAY_NATIVE_MARCH", flag)
        for flags in ("flags: a b", "flags: a b c"):
            monkeypatch.setattr(build, "_cpu_flags", lambda flags=flags: flags)
            build._key.cache_clear()
            found.append(build.library())
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_without_a_compiler_one_that_was_built_is_taken(
    compiler_that_logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is damaged."""
    built = build.library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert build.library() == built
    os.truncate(built, 3)
    with pytest.raises(build.NativeUnavailableError, match=r"no C\+\+ compiler"):
        build.library()


def test_no_compiler_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.NativeUnavailableError, match=r"no C\+\+ compiler"):
        build.library()


def test_no_place_to_write_to_is_no_reason_to_stop(
    compiler_that_logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a read-only home runs on torch then, as without a compiler."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.NativeUnavailableError, match="could not build it in"):
        build.library()


def test_a_compiler_that_is_none_is_no_reason_to_stop(compiler_that_logs: Path) -> None:
    Path(os.environ["CXX"]).write_bytes(b"\x7fELF, but not really")
    build._key.cache_clear()
    with pytest.raises(build.NativeUnavailableError, match="cxx could not build it"):
        build.library()


def test_a_failing_compiler_leaves_nothing_behind(compiler_that_logs: Path, tmp_path: Path) -> None:
    Path(os.environ["CXX"]).write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "step.cpp:1: error: no such luck" >&2\nexit 1\n'
    )
    build._key.cache_clear()
    with pytest.raises(build.NativeUnavailableError, match="no such luck"):
        build.library()
    assert [path.name for path in (tmp_path / "cache" / "kernels").iterdir()] == ["lock"]
