"""The YAML as models: names and defaults of DESIGN §5, frozen, nothing unknown."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.settings import Settings
from gateway.settings_base import Section, SettingsError
from gateway.settings_quota import Budget, LimitsConfig
from policies.types import Limits, TokenPrice

MINIMAL: dict[str, Any] = {
    "policies": {"auth": {"use": "none"}},
    "models": [{"name": "m", "source": "x", "pools": [{"name": "p"}]}],
}


def sections(of: type[Section] = Section) -> list[type[Section]]:
    return [sub for section in of.__subclasses__() for sub in [section, *sections(section)]]


def test_names_of_the_design_are_there() -> None:
    """DESIGN §5: later issues add keys, never rename them."""
    settings = Settings.model_validate(
        MINIMAL
        | {
            "listen": {"host": "127.0.0.1", "port": 8080},
            "admin": {"host": "127.0.0.1", "port": 8081, "token_env": "X"},
            "plugins": ["a"],
            "classes": {"interactive": {"priority": 1, "max_wait_s": 20, "slo": {"ttft_p95_ms": 1, "itl_p95_ms": 2}}},
            "tenants": [
                {
                    "id": "search",
                    "weight": 4,
                    "class": "interactive",
                    "models": ["*"],
                    "limits": {
                        "requests_per_minute": 1,
                        "tokens_per_minute": 2,
                        "concurrent": 3,
                        "max_output_tokens": 4,
                        "max_context_tokens": 5,
                    },
                    "requires": {"region": "eu"},
                    "privacy": {"allow_external": False},
                }
            ],
            "tenant_defaults": {"weight": 1, "class": "interactive"},
            "timeouts": {"first_token_s": 1, "total_s": 2, "step_stall_s": 3},
            "telemetry": {"otlp_endpoint": None, "otlp_protocol": "grpc", "sample_ratio": 1, "capture_content": False},
        }
    )
    tenant = settings.tenants[0]
    assert (tenant.class_, tenant.requires, tenant.privacy.allow_external) == ("interactive", {"region": "eu"}, False)
    assert tenant.limits.to_limits() == Limits(1, 2, 3, 4, 5)


def test_every_section_is_frozen_and_takes_no_unknown_key() -> None:
    for section in sections():
        assert section.model_config["extra"] == "forbid", section
        assert section.model_config["frozen"], section
    settings = Settings.model_validate(MINIMAL)
    with pytest.raises(ValidationError):
        settings.listen.port = 1


def test_limits_are_those_that_policies_see() -> None:
    assert {*LimitsConfig.model_fields, *Budget.model_fields} - {"budget"} == set(Limits.__slots__)
    assert LimitsConfig().to_limits() == Limits()


@pytest.mark.parametrize("limit", sorted(LimitsConfig.model_fields))
@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_a_limit_is_a_positive_number_or_absent(limit: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        LimitsConfig.model_validate({limit: value})


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan"), 1e7, "heavy", 1e-320, 9e-7])
def test_a_weight_is_a_positive_finite_number(weight: Any) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(MINIMAL | {"tenants": [{"id": "a", "weight": weight}]})


@pytest.mark.parametrize("name", ["", " ", "a b", "-a", "a/b", "a\n", "é", "x" * 129])
def test_a_tenants_id_is_a_plain_word(name: str) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(MINIMAL | {"tenants": [{"id": name}]})


def test_mistakes_between_keys_carry_their_paths() -> None:
    data = MINIMAL | {
        "tenants": [{"id": "a", "class": "x"}, {"id": "b", "class": "y"}],
        "tenant_defaults": {"class": "z"},
        "listen": {"port": 9},
        "admin": {"port": 9},
    }
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(data)
    (detail,) = caught.value.errors()
    cause = detail["ctx"]["error"]
    assert isinstance(cause, SettingsError)
    assert [path for path, _ in cause.mistakes] == [
        ("tenants", 0, "class"),
        ("tenants", 1, "class"),
        ("tenant_defaults", "class"),
        ("admin", "port"),
    ]
    assert "tenants.0.class: unknown class 'x'" in str(cause)


def test_two_free_ports_are_no_conflict() -> None:
    settings = Settings.model_validate(MINIMAL | {"listen": {"port": 0}, "admin": {"port": 0}})
    assert settings.listen.port == settings.admin.port == 0


@pytest.mark.parametrize("endpoint", ["not a url", "ftp://c", "http://", "http://c:99999"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ValidationError, match=r"telemetry\.otlp_endpoint\n.*is no http\(s\) URL"):
        Settings.model_validate(MINIMAL | {"telemetry": {"otlp_endpoint": endpoint}})


def test_classes_that_are_named_exist() -> None:
    """Caps and pools that name an unknown class would silently do nothing."""
    pools = [{"name": "fast", "classes": ["interactive"]}, {"name": "bulk", "classes": ["interactive", "bulk"]}]
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(
            MINIMAL
            | {
                "queue": {"max_running_per_class": {"batch": 4, "interactive": 8}},
                "models": [{"name": "m", "source": "x", "pools": pools}],
            }
        )
    cause = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(cause, SettingsError)
    assert [path for path, _ in cause.mistakes] == [
        ("queue", "max_running_per_class", "batch"),
        ("models", 0, "pools", 1, "classes", 1),
    ]


@pytest.mark.parametrize(
    ("queue", "path"),
    [
        ({"max_running_per_tenant": 0}, ("queue", "max_running_per_tenant")),
        ({"max_running_tokens_per_tenant": -1}, ("queue", "max_running_tokens_per_tenant")),
        ({"max_running_per_class": {"interactive": 0}}, ("queue", "max_running_per_class")),
        ({"max_overtaken": 0}, ("queue", "max_overtaken")),
    ],
)
def test_caps_are_at_least_one(queue: dict[str, Any], path: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(MINIMAL | {"queue": queue})
    assert [error["loc"] for error in caught.value.errors()] == [path]


def test_money_is_exact_and_a_misspelt_name_is_no_gift() -> None:
    """Prices are per million tokens, inside whole billionths; what is not there is a mistake."""
    settings = Settings.model_validate(
        MINIMAL
        | {
            "organisations": [{"id": "acme", "limits": {"budget": {"currency_per_month": 12.5}}}],
            "tenants": [{"id": "a", "organisation": "acme"}],
            "prices": {"currency": "EUR", "models": {"m": {"input": 0.15, "output": "0.601"}}},
        }
    )
    assert settings.organisations[0].limits.to_limits().currency_per_month == 12_500_000_000
    assert settings.prices.models["m"].to_price() == TokenPrice(150, 150, 601)
    for changes, where in (
        ({"prices": {"models": {"n": {}}}}, "prices.models.n: unknown model 'n' (known: m)"),
        ({"tenants": [{"id": "a", "organisation": "x"}]}, "tenants.0.organisation: unknown organisation 'x'"),
        ({"tenant_defaults": {"organisation": "x"}}, "tenant_defaults.organisation: unknown organisation 'x'"),
        ({"organisations": [{"id": "a"}, {"id": "a"}]}, "duplicate organisation id 'a'"),
        ({"tenants": [{"id": "a", "key_limits": {"budget": {"tokens_per_month": 1}}}]}, "a rotated key would begin"),
        ({"prices": {"models": {"m": {"input": True}}}}, "write a number, not true"),
        ({"prices": {"models": {"m": {"input": 0.0001}}}}, "no more than 3 decimal places"),
        ({"prices": {"models": {"m": {"input": -1}}}}, "greater than or equal to 0"),
        ({"prices": {"models": {"m": {"input": float("nan")}}}}, "finite number"),
    ):
        with pytest.raises(ValueError, match=re.escape(where)):
            Settings.model_validate(MINIMAL | changes)
