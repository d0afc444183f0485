"""Where files live, and the development key: the user's alone, whole, the same for everybody who asks."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway import paths
from gateway.paths import PathError, cache_dir, config_dir, dev_key, dev_key_path, resolve_config, state_dir


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_CACHE", "FOREBAY_STATE", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_the_shipped_files_are_found() -> None:
    assert (config_dir() / "demo.yaml").is_file()
    assert resolve_config("demo") == config_dir() / "demo.yaml"


def test_a_wheel_carries_them_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "gateway"
    (package / "_config").mkdir(parents=True)
    (package / "_config" / "demo.yaml").write_text("")
    monkeypatch.setattr(paths, "__file__", str(package / "paths.py"))
    assert config_dir() == package / "_config"
    assert resolve_config("demo") == package / "_config" / "demo.yaml"


def test_a_path_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text("")
    assert resolve_config("demo") == tmp_path / "demo"
    assert resolve_config("./demo") == tmp_path / "demo"


@pytest.mark.parametrize("name", ["nosuch", "./nosuch.yaml", "../demo", "", "a/demo"])
def test_an_unknown_name_lists_the_shipped_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PathError, match="demo" if name else "folder|no file"):
        resolve_config(name)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="folder"):
        resolve_config(str(tmp_path))


def test_cache_and_state_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    assert (cache_dir(), state_dir()) == (home / ".cache/forebay", home / ".local/state/forebay")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    monkeypatch.setenv("XDG_STATE_HOME", "/x/state")
    assert (cache_dir(), state_dir()) == (Path("/x/cache/forebay"), Path("/x/state/forebay"))
    monkeypatch.setenv("FOREBAY_CACHE", "/y")
    assert (cache_dir(), state_dir()) == (Path("/y"), Path("/y/state"))
    monkeypatch.setenv("FOREBAY_STATE", "~/z")
    assert state_dir() == home / "z"


def test_the_key_is_made_once_outside_the_repository_for_the_user_alone() -> None:
    key = dev_key()
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    assert dev_key() == key
    path = dev_key_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert Path(__file__).parents[2] not in path.parents
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_loose_umask_changes_nothing() -> None:
    before = os.umask(0)
    try:
        dev_key()
    finally:
        os.umask(before)
    assert dev_key_path().stat().st_mode & 0o777 == 0o600


def test_all_who_start_at_once_get_the_same_key() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: dev_key(), range(32)))) == 1


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o606, 0o660])
def test_a_key_that_others_may_read_is_refused(mode: int) -> None:
    dev_key()
    dev_key_path().chmod(mode)
    with pytest.raises(PathError, match="not this user's alone") as caught:
        dev_key()
    assert str(dev_key_path()) in str(caught.value)


def test_a_link_is_refused(tmp_path: Path) -> None:
    dev_key()
    elsewhere = tmp_path / "elsewhere"
    dev_key_path().rename(elsewhere)
    dev_key_path().symlink_to(elsewhere)
    with pytest.raises(PathError, match="cannot be read"):
        dev_key()


def test_a_link_to_nowhere_is_not_followed_to_make_a_key(tmp_path: Path) -> None:
    dev_key_path().parent.mkdir(parents=True)
    dev_key_path().symlink_to(tmp_path / "target")
    with pytest.raises(PathError, match="cannot be read"):
        dev_key()
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("text", ["", "short\n", " \n" * 50])
def test_an_empty_or_short_key_is_refused(text: str) -> None:
    dev_key()
    dev_key_path().write_text(text)
    with pytest.raises(PathError, match="too short"):
        dev_key()


def test_a_folder_in_the_keys_place_is_refused() -> None:
    dev_key_path().mkdir(parents=True)
    with pytest.raises((PathError, IsADirectoryError)):
        dev_key()


def test_where_no_key_can_be_made_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a home that is read-only, say."""
    monkeypatch.setenv("FOREBAY_STATE", "/proc/nowhere")
    with pytest.raises(PathError, match=r"/proc/nowhere/dev-jwt\.key cannot be made .*; set FOREBAY_STATE"):
        dev_key()
