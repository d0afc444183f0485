"""Building, reloading and the operator's side of a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.compose import BuildError, build
from gateway.config_file import ConfigErrors
from gateway.settings import Settings
from tests.gateway.conftest import Start
from tests.gateway.harness import AUTH, BASE, KEY, merged


def settings(**changes: Any) -> Settings:
    base = merged(BASE, {"models": [{"name": "m", "source": "x", "pools": [{"name": "local"}]}]})
    return Settings.model_validate(merged(base, changes))


def test_a_missing_key_is_named() -> None:
    with pytest.raises(BuildError, match="FOREBAY_JWT_KEY"):
        build(settings(), env={})


def test_an_open_admin_listener_needs_a_token() -> None:
    """DESIGN §6: without a token it starts on loopback only."""
    env = {"FOREBAY_JWT_KEY": KEY}
    with pytest.raises(BuildError, match=r"admin\.host: '0\.0\.0\.0'.*FOREBAY_ADMIN_TOKEN"):
        build(settings(admin={"host": "0.0.0.0", "port": 0}), env=env)


async def test_an_open_admin_listener_with_a_token_is_made() -> None:
    env = {"FOREBAY_JWT_KEY": KEY, "FOREBAY_ADMIN_TOKEN": "too short"}
    with pytest.raises(BuildError, match=r"the token of admin has fewer than 16 characters.*openssl rand"):
        build(settings(admin={"host": "0.0.0.0", "port": 0}), env=env)
    env["FOREBAY_ADMIN_TOKEN"] = "long enough not to be guessed"
    gateway = build(settings(admin={"host": "0.0.0.0", "port": 0}), env=env)
    assert gateway.missing == ["starting"]
    await gateway.stop()


async def test_workers_of_other_machines_without_tls_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    addresses = ["127.0.0.1:9", "[::1]:9", "localhost:9", "unix:/run/w", "10.0.0.5:9000", "gpu1.internal:9000"]
    launch = {"use": "static", "addresses": addresses, "secret_env": "S", "count": 6}
    pools = [{"name": "far", "launch": launch}]
    changes = {"models": [{"name": "m", "source": "x", "pools": pools}]}
    gateway = build(settings(**changes), env={"FOREBAY_JWT_KEY": KEY, "S": "a secret of workers"})
    said = [line for line in capsys.readouterr().out.splitlines() if "worker_unencrypted" in line]
    assert len(said) == 2
    assert "10.0.0.5:9000" in said[0]
    assert "gpu1.internal:9000" in said[1]
    await gateway.stop()


def test_what_a_launcher_has_against_its_settings_is_named() -> None:
    launch = {"use": "static", "addresses": ["unix:/run/w"], "secret_env": "GONE"}
    changes = {"models": [{"name": "m", "source": "x", "pools": [{"name": "far", "launch": launch}]}]}
    with pytest.raises(
        BuildError, match=r"models\[m\]\.pools\[far\]\.launch\.secret_env: .* GONE is not set; set it to"
    ):
        build(settings(**changes), env={"FOREBAY_JWT_KEY": KEY})


def test_an_unknown_sampler_is_named() -> None:
    env = {"FOREBAY_JWT_KEY": KEY, "OTEL_TRACES_SAMPLER": "sometimes"}
    with pytest.raises(BuildError, match="OTEL_TRACES_SAMPLER"):
        build(settings(), env=env)


def written(path: Path, **changes: Any) -> Path:
    """A configuration file of a gateway with the registered launchers (a reload changes no pool)."""
    base = merged(BASE, {"models": [{"name": "echo", "source": "model", "pools": [{"name": "local"}]}]})
    path.write_text(yaml.safe_dump(merged(base, changes)))
    return path


async def test_a_reload_changes_policies_tenants_and_limits_of_new_requests(start: Start, tmp_path: Path) -> None:
    path = written(tmp_path / "config.yaml")
    async with start(config_path=path) as site:
        assert (await site.complete("gamma")).status_code == 403
        written(
            path,
            tenants=[{"id": "alpha", "limits": {"requests_per_minute": 5}}, {"id": "gamma"}],
            policies={"auth": AUTH, "scheduling": {"use": "vtc"}},
        )
        await site.gateway.reload()
        assert (await site.complete("gamma")).status_code == 200
        assert (await site.complete("beta")).status_code == 403
        assert (await site.complete("alpha")).headers["x-ratelimit-limit-requests"] == "5"
        assert site.dispatcher.snapshot()["policy"] == "vtc"
        assert site.gateway.parts.runtime.current.generation == 2
        await site.gateway.reload()
        assert site.gateway.parts.runtime.current.generation == 2, "nothing changed: nothing swapped"


async def test_a_reload_of_a_broken_file_changes_nothing(start: Start, tmp_path: Path) -> None:
    path = written(tmp_path / "config.yaml")
    async with start(config_path=path) as site:
        written(path, tenants=[{"id": "gamma", "wieght": 2}], policies={"auth": AUTH, "scheduling": {"use": "vtx"}})
        with pytest.raises(ConfigErrors) as caught:
            await site.gateway.reload()
        assert "wieght" in str(caught.value)
        assert (await site.complete("alpha")).status_code == 200
        assert site.gateway.parts.runtime.current.generation == 1


async def test_stopping_twice_and_before_a_start_is_harmless() -> None:
    gateway = build(settings(), env={"FOREBAY_JWT_KEY": KEY})
    await gateway.stop()
    await gateway.stop()
