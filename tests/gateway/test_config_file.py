"""The YAML file: every mistake at once, with its path, its line and a remedy."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import yaml

from gateway import yaml_source
from gateway.config_file import ConfigErrors, Loaded, check, json_schema, load
from gateway.paths import config_dir, shipped_configs
from gateway.settings import Settings
from policies.manager import make_manager
from policies.registry import Registry

MINIMAL = """\
policies:
  auth: {use: none, with: {tenant: dev}}
models:
  - name: tiny
    source: ./tiny
    pools:
      - {name: local}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "forebay.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def mistakes(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        load(write(tmp_path, text))
    return [str(mistake) for mistake in caught.value.mistakes]


def registry() -> Registry:
    return Registry.from_manager(make_manager())


def test_a_minimal_file_gets_the_documented_defaults(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, MINIMAL))
    assert loaded.base_dir == tmp_path
    settings = loaded.settings
    assert (settings.listen.host, settings.listen.port, settings.admin.port) == ("127.0.0.1", 8080, 8081)
    assert settings.policies.quota.use == "token_bucket"
    assert settings.policies.scheduling.use == "vtc"
    assert settings.models[0].default_max_tokens == 256
    assert settings.models[0].pools[0].engine.block_size == 16
    assert settings.tenant_defaults is None


def test_the_sha_changes_with_the_text_only(tmp_path: Path) -> None:
    first = load(write(tmp_path, MINIMAL)).text_sha
    assert load(write(tmp_path, MINIMAL)).text_sha == first
    assert load(write(tmp_path, MINIMAL + "# a comment\n")).text_sha != first


@pytest.mark.parametrize(
    "path", [*shipped_configs(), config_dir() / "deploy" / "gateway.yaml"], ids=lambda path: path.stem
)
def test_shipped_files_have_no_mistakes(path: Path) -> None:
    load(path).verify(registry())


def test_all_mistakes_come_at_once_with_path_line_and_remedy(tmp_path: Path) -> None:
    found = mistakes(
        tmp_path,
        """\
        listen: {host: 127.0.0.1, prot: 8080}
        policies: {auth: {use: none}}
        classes: {interactive: {priority: high}}
        tenants:
          - {id: "a b", limits: {concurent: 5}}
          - {id: b, weight: -1}
        models:
          - name: m
            source: x
            pools:
              - name: p
                engine:
                  block_size: 0
        """,
    )
    assert found == [
        "listen.prot (line 1): unknown key; did you mean 'port'? "
        "(known: host, max_body_bytes, max_connections, port, refused_per_minute, tls, unauthenticated_per_minute)",
        "classes.interactive.priority (line 3): write a number, not text, got 'high'",
        "tenants[0].limits.concurent (line 5): unknown key; did you mean 'concurrent'? (known: budget, concurrent, "
        "input_tokens_per_day, input_tokens_per_hour, input_tokens_per_minute, kv_tokens, max_context_tokens, "
        "max_output_tokens, output_tokens_per_day, output_tokens_per_hour, output_tokens_per_minute, queued, "
        "requests_per_day, requests_per_hour, requests_per_minute, tokens_per_day, tokens_per_hour, tokens_per_minute)",
        "tenants[0].id (line 5): String should match pattern '^[A-Za-z0-9][A-Za-z0-9._:@-]*$', got 'a b'",
        "tenants[1].weight (line 6): Input should be greater than or equal to 0.000001, got -1",
        "models[0].pools[0].engine.block_size (line 13): Input should be greater than or equal to 1, got 0",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; start from a shipped one (forebay config check demo)"),
        ("# only a comment\n", "is empty; start from a shipped one (forebay config check demo)"),
        ("- a\n- b\n", "line 1: must be a mapping of sections (listen:, policies:, models: …)"),
        ("just text", "line 1: must be a mapping of sections (listen:, policies:, models: …)"),
        (MINIMAL + "listen: {port: 1}\nlisten: {port: 2}\n", "listen (line 9): duplicate key, first on line 8"),
        (MINIMAL + "admin: {port: 1, port: 2}\n", "admin.port (line 8): duplicate key, first on line 8"),
        (
            MINIMAL + "classes:\n  a: {priority: 1\n",
            "line 10: not valid YAML: expected ',' or '}', but got '<stream end>'",
        ),
        (MINIMAL + "listen: {port: {a: 1}}\n", "listen.port (line 8): write a whole number"),
        (
            MINIMAL + "listen: {port: 70000}\n",
            "listen.port (line 8): Input should be less than or equal to 65535, got 70000",
        ),
        (MINIMAL + "listen: {port: null}\n", "listen.port (line 8): write a whole number, got null"),
        (MINIMAL + "timeouts: {total_s: .nan}\n", "timeouts.total_s (line 8): write a finite number, got nan"),
        (MINIMAL + "1: x\n", "line 8: a key must be text, 1 is not; put it in quotes"),
        (MINIMAL + "on: x\n", "line 8: a key must be text, True is not; put it in quotes"),
        (MINIMAL + "? [a]\n: x\n", "line 8: a key must be text, this is not; put it in quotes"),
        (
            MINIMAL + "a: !!python/object/apply:os.system ['true']\n",
            "a (line 8): the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed",
        ),
        (MINIMAL + "a: !secret x\n", "line 8: not valid YAML: could not determine a constructor for the tag '!secret'"),
        (MINIMAL + "a: &x [*x]\n", "a[0] (line 8): an anchor cannot hold itself"),
        (MINIMAL + "a: &x {<<: *x}\n", "a (line 8): an anchor cannot hold itself"),
        (MINIMAL + "a: {<<: 5}\n", "a (line 8): '<<' takes a mapping or a list of mappings"),
        (MINIMAL + "a: " + "[" * 1500 + "]" * 1500, "nests too deep to be a configuration"),
        (MINIMAL + "a: 2020-99-99\n", "not valid YAML: month must be in 1..12"),
        (MINIMAL + "a: b: c\n", "line 8: not valid YAML: mapping values are not allowed here"),
        (MINIMAL + "a: \x07\n", "not valid YAML: unacceptable character #x0007: special characters are not allowed"),
        (MINIMAL + "---\nb: 1\n", "line 8: not valid YAML: but found another document"),
        (MINIMAL.replace("auth:", "auht:"), "policies.auth (line 1): is missing"),
        ("policies: {auth: {use: none}}\nmodels: []\n", "models (line 2): needs at least one entry"),
        (
            MINIMAL + "tenants:\n  - {id: a}\n  - {id: a}\n",
            "tenants[1].id (line 10): duplicate tenant id 'a', the same as number 0 (counted from 0)",
        ),
        (
            MINIMAL + "      - {name: local}\n",
            "models[0].pools[1].name (line 8): duplicate pool name 'local', the same as number 0 (counted from 0)",
        ),
        (
            MINIMAL + "tenants: [{id: a, class: nosuch}]\n",
            "tenants[0].class (line 8): unknown class 'nosuch' (known: interactive)",
        ),
        (
            MINIMAL + "tenant_defaults: {class: x}\n",
            "tenant_defaults.class (line 8): unknown class 'x' (known: interactive)",
        ),
        (
            MINIMAL + "admin: {port: 8080}\n",
            "admin.port (line 8): 8080 is the public port; the admin API needs its own",
        ),
        (
            MINIMAL + "tenants: [{id: a, weight: 1.0e-320}]\n",
            "tenants[0].weight (line 8): must be 0, or between 1e-09 and 1e+15 in size; got 1e-320",
        ),
        (
            MINIMAL + "tenants: [{id: a, weight: .inf}]\n",
            "tenants[0].weight (line 8): write a finite number, got inf",
        ),
        (
            MINIMAL.replace("{name: local}", "{name: local, engine: {kv_cache: 5 parsecs}}"),
            "models[0].pools[0].engine.kv_cache (line 7): '5 parsecs' is not a size; write a number of bytes or e.g.",
        ),
    ],
)
def test_a_mistake_says_where_and_what(tmp_path: Path, text: str, expected: str) -> None:
    assert any(found.startswith(expected) for found in mistakes(tmp_path, text)), mistakes(tmp_path, text)


def test_values_that_could_be_secret_are_not_repeated(tmp_path: Path) -> None:
    found = mistakes(tmp_path, MINIMAL + "admin: {token_env: [hunter2], token: hunter2}\n")
    assert len(found) == 2
    assert not any("hunter2" in line for line in found)


def test_a_small_file_cannot_become_a_big_one(tmp_path: Path) -> None:
    layers = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    layers += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert mistakes(tmp_path, MINIMAL + "\n".join(layers) + "\n") == [
        f"expands to more than {yaml_source.MAX_VALUES} values; use fewer anchors"
    ]


def test_merge_keys_work_and_own_keys_win(tmp_path: Path) -> None:
    text = MINIMAL.replace("    pools:\n      - {name: local}\n", "")
    text += "    pools: &p\n      - &base {name: one, labels: {a: x, b: y}}\n      - {<<: *base, name: two}\n"
    pools = load(write(tmp_path, text)).settings.models[0].pools
    assert [(pool.name, pool.labels) for pool in pools] == [
        ("one", {"a": "x", "b": "y"}),
        ("two", {"a": "x", "b": "y"}),
    ]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: path.mkdir(), "is a folder; name the YAML file in it"),
        (lambda path: None, "cannot be read: No such file or directory"),
        (lambda path: path.write_bytes(b"a: 1\nb: \xff\n"), "line 2: is not UTF-8 text"),
        (
            lambda path: path.write_bytes(b"#" * (yaml_source.MAX_BYTES + 1)),
            f"is larger than {yaml_source.MAX_BYTES} bytes",
        ),
    ],
)
def test_what_is_no_text_file_is_refused(tmp_path: Path, make: object, expected: str) -> None:
    path = tmp_path / "c.yaml"
    make(path)  # type: ignore[operator]
    with pytest.raises(ConfigErrors) as caught:
        load(path)
    assert [str(mistake) for mistake in caught.value.mistakes] == [expected]
    assert str(caught.value) == f"{path}: {expected}"


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load(path).settings.models[0].name == "tiny"


def with_policies(tmp_path: Path, policies: str) -> Loaded:
    return load(
        write(tmp_path, MINIMAL.replace("  auth: {use: none, with: {tenant: dev}}\n", textwrap.indent(policies, "  ")))
    )


def test_policies_are_checked_against_the_registry_with_lines(tmp_path: Path) -> None:
    loaded = with_policies(
        tmp_path,
        "auth: {use: none, with: {tenant: dev}}\n"
        "scheduling:\n  use: vtcc\n"
        "admission:\n  use: bounded\n  with:\n    max_queud: 5\n",
    )
    with pytest.raises(ConfigErrors) as caught:
        loaded.verify(registry())
    found = [str(mistake) for mistake in caught.value.mistakes]
    assert len(found) == 2
    assert found[0].startswith(
        "policies.scheduling.use (line 4): unknown scheduling policy 'vtcc'; did you mean 'vtc'?"
    )
    assert found[1].startswith(
        "policies.admission.with.max_queud (line 8): unknown key 'max_queud'; did you mean 'max_queued'?"
    )


def test_unknown_launchers_are_mistakes(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, MINIMAL.replace("{name: local}", "{name: local, launch: {use: locall}}")))
    (mistake,) = check(loaded.settings, registry())
    assert mistake.path == ("models", 0, "pools", 0, "launch", "use")
    assert "did you mean 'local'?" in mistake.message


def test_a_model_whose_workers_load_it_needs_a_source(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, MINIMAL.replace("    source: ./tiny\n", "")))
    with pytest.raises(
        ConfigErrors, match=r"models\[0\]\.source .*is missing: the workers of pool 'local' load a model"
    ):
        loaded.verify(registry())


def test_an_auth_policy_without_an_audience_is_a_mistake(tmp_path: Path) -> None:
    """gateway D3: a config without audience refuses to start."""
    loaded = with_policies(tmp_path, "auth: {use: jwt, with: {algorithms: [HS256], issuer: x, key_env: K}}\n")
    with pytest.raises(ConfigErrors, match=r"policies\.auth\.with\.audience"):
        loaded.verify(registry())


def test_the_shipped_schema_is_the_models_schema() -> None:
    """Write it anew with: forebay config schema > config/schema.json"""
    assert json.loads((config_dir() / "schema.json").read_text()) == json_schema()


def test_the_schema_names_every_section_and_refuses_unknown_keys() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Settings.model_fields)
    for name, section in schema["$defs"].items():
        if section.get("type") == "object":
            assert section["additionalProperties"] is False, name
    demo = yaml.safe_load((config_dir() / "demo.yaml").read_text())
    assert set(demo) <= set(schema["properties"])


@pytest.mark.parametrize(
    ("path", "expected"),
    [((), ""), (("a",), "a"), (("models", 0, "pools", 12, "x"), "models[0].pools[12].x"), ((0, "a"), "[0].a")],
)
def test_paths_are_written_as_people_write_them(path: yaml_source.Path, expected: str) -> None:
    assert yaml_source.dotted(path) == expected
