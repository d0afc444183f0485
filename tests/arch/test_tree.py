"""What holds for every file of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.arch.source import ROOT, files, modules

MAX_LINES = 400
MAX_BYTES = 2**20
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".sh", ".cfg", ".ini", ".txt", ".proto", ".html", ".js", ""}

# A home folder or a working folder of one machine has no place here, and neither has a credential.
FORBIDDEN = {
    "home folder": re.compile(r"/(?:(?:home|Users)/[a-z][a-z0-9_.-]*|root)/"),
    "private key": re.compile(r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----"),
    "JSON web token": re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    "cloud key": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "API key": re.compile(r"\b(?:sk-(?:proj-)?[A-Za-z0-9]{24,}|gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,})\b"),
    "merge conflict": re.compile(r"^(?:<{7}|>{7}) "),
    "package index": re.compile(r"--(?:extra-)?index-url|--find-links"),
}


def text_files() -> list[Path]:
    return [path for path in files() if path.suffix in TEXT and path != Path(__file__)]


def test_modules_are_small() -> None:
    long = {name: n for name, path in modules().items() if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert long == {}, f"over {MAX_LINES} lines: give each idea its own module"


def test_files_are_small() -> None:
    assert [str(path.relative_to(ROOT)) for path in files() if path.stat().st_size > MAX_BYTES] == []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_that_has_no_place_here(what: str) -> None:
    pattern = FORBIDDEN[what]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_no_unfinished_work() -> None:
    """Stubs and notes to oneself belong in an issue."""
    pattern = re.compile(r"\b(?:TODO|FIXME|XXX)\b|@pytest\.mark\.(?:skip|xfail)\b|pytest\.skip\(")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in text_files()
        if path.suffix == ".py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_no_merge_is_unfinished() -> None:
    marks = re.compile(r"^(?:<{7}|={7}|>{7})(?: |$)", re.MULTILINE)
    assert [
        str(path.relative_to(ROOT)) for path in text_files() if marks.search(path.read_text(errors="replace"))
    ] == []


def test_every_package_directory_has_an_init() -> None:
    """Tests of equal file names in different folders collide without it, and so do modules in a wheel."""
    folders = {path.parent for path in files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "plugins"}
    missing = [
        str(folder.relative_to(ROOT)) for folder in folders if folder != ROOT and not (folder / "__init__.py").exists()
    ]
    assert missing == []
