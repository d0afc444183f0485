"""``scripts/setup`` installs once, and again only when what it installed for has changed. Nothing is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.arch.source import ROOT

PYTHON = """#!/bin/sh
# The environment's interpreter, but pip only notes that it was asked.
case "$*" in *"-m pip"*) echo "$*" >> "$(dirname "$0")/../installs"; exit "${PIP_EXIT:-0}";; esac
exec {real} "$@"
"""


def project(folder: Path) -> Path:
    """A copy of what the script reads, with an environment that exists already."""
    (folder / "scripts").mkdir()
    for name in ("setup", "find-python"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    python = folder / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.replace("{real}", sys.executable))
    python.chmod(0o755)
    return folder


def setup(folder: Path, **environment: str) -> tuple[int, str, int]:
    """Exit code, output, and how often pip was asked until now."""
    done = subprocess.run(
        ["scripts/setup"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "VENV": "env", "PYTHON": sys.executable, **environment},
    )
    installs = folder / "env/installs"
    asked = len(installs.read_text().splitlines()) if installs.exists() else 0
    return done.returncode, done.stdout + done.stderr, asked


def test_a_second_call_does_nothing(tmp_path: Path) -> None:
    folder = project(tmp_path)
    code, output, installs = setup(folder)
    assert (code, installs) == (0, 1)
    assert "Installing" in output
    assert "-e .[test,check]" in (folder / "env/installs").read_text()
    assert setup(folder) == (0, "", 1)
    assert setup(folder) == (0, "", 1)


def test_other_dependencies_are_installed(tmp_path: Path) -> None:
    folder = project(tmp_path)
    setup(folder)
    with (folder / "pyproject.toml").open("a") as file:
        file.write("# one more\n")
    assert setup(folder)[2] == 2
    assert setup(folder) == (0, "", 2)


def test_an_installation_that_failed_is_tried_again(tmp_path: Path) -> None:
    folder = project(tmp_path)
    assert setup(folder, PIP_EXIT="1")[0] == 1
    assert setup(folder)[2] == 2
    assert setup(folder) == (0, "", 2)
