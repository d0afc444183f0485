"""Where state is kept: made for this user alone, or refused with a remedy."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.settings import State
from gateway.state.folder import StateError, folder


def test_without_a_path_nothing_is_kept(tmp_path: Path) -> None:
    assert folder(State(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_it_is_made_for_this_user_alone_and_starts_at_the_file(tmp_path: Path) -> None:
    made = folder(State(path="a/b"), tmp_path)
    assert made == tmp_path / "a" / "b"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert folder(State(path="a/b"), tmp_path) == made


def test_the_home_is_known_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder(State(path="~/kept"), Path("/")) == tmp_path / "kept"


def test_one_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StateError, match=r"state\.path: .*mode 755.*chmod 700"):
        folder(State(path="open"), tmp_path)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"state\.path: .*cannot be made"):
        folder(State(path="file"), tmp_path)
