"""What `pip install .` puts on a machine, and that it works there without this tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.arch.source import ROOT, files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the project's backend in this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_packages_and_the_yaml_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"gateway", "policies", "workers"}
    shipped = {path.relative_to(ROOT / "config") for path in files() if path.is_relative_to(ROOT / "config")}
    assert shipped
    assert {f"gateway/_config/{path}" for path in shipped} <= names
    assert {"gateway/py.typed", "policies/py.typed", "workers/py.typed"} <= names
    pages = {path.relative_to(ROOT) for path in files() if path.is_relative_to(ROOT / "gateway" / "http" / "console")}
    assert {str(path) for path in pages} <= names
    [metadata] = [name for name in names if name.endswith("/METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_an_installed_copy_finds_its_files(wheel: Path, tmp_path: Path) -> None:
    """Away from the tree, as after `pip install .`: the shipped configuration is found inside the package."""
    place = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(place)
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import gateway.paths, gateway.cli;"
        "print(gateway.paths.config_dir()); sys.argv = ['forebay', 'config', 'check', 'demo']; gateway.cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(place)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(place / "gateway" / "_config")
    assert str(place / "gateway" / "_config" / "demo.yaml") in done.stderr
