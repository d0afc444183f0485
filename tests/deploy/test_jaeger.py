"""``config/jaeger.yaml`` as Jaeger v2 would read it: its components and keys, and what its tail sampling keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.arch.source import ROOT
from tests.deploy.jaeger_keys import unknown
from tests.deploy.stack import CONFIG, read

JAEGER_HAS = {
    "receivers": {"otlp", "jaeger", "kafka", "zipkin", "nop"},
    "processors": {"batch", "memory_limiter", "tail_sampling", "adaptive_sampling", "attributes", "filter"},
    "exporters": {"jaeger_storage_exporter", "prometheus", "otlp", "otlphttp", "debug", "kafka", "nop"},
    "connectors": {"spanmetrics", "forward"},
    "extensions": {"jaeger_storage", "jaeger_query", "healthcheckv2", "remote_sampling", "pprof", "zpages", "expvar"},
}
"""Components built into Jaeger v2 (its cmd/jaeger/internal/components.go)."""


def test_every_key_is_one_that_jaeger_knows() -> None:
    """An unknown one would stop its start. Also in what is there to be uncommented."""
    assert list(unknown(read("jaeger.yaml"))) == []
    text = (CONFIG / "jaeger.yaml").read_text()
    [instead] = re.findall(r"#   (main: \{badger.*)", text)
    backend = yaml.safe_load(instead)
    assert list(unknown({"extensions": {"jaeger_storage": {"backends": backend}}})) == []
    misspelt = {"processors": {"tail_sampling": {"policies": [{"and": {"and_sub_policies": []}}], "num_trace": 1}}}
    assert list(unknown(misspelt)) == [
        "processors.tail_sampling.policies[].and.and_sub_policies", "processors.tail_sampling.num_trace",
    ]  # fmt: skip
    assert list(unknown({"receivers": {"otlp": 4317}})) == ["receivers.otlp has a value, where keys belong"]


def test_a_policy_configures_its_own_type() -> None:
    for policy in basic_policies(read("jaeger.yaml")["processors"]["tail_sampling"]["policies"]):
        assert set(policy) == {"name", "type", policy["type"]}, policy["name"]


def test_decisions_are_remembered_much_longer_than_traces() -> None:
    """A late span follows its trace's decision; the processor's own advice is an order of magnitude."""
    sampling = read("jaeger.yaml")["processors"]["tail_sampling"]
    assert min(sampling["decision_cache"].values()) >= 10 * sampling["num_traces"]


def test_jaeger_is_made_of_components_that_it_has() -> None:
    jaeger = read("jaeger.yaml")
    for section, known in JAEGER_HAS.items():
        assert set(jaeger[section]) <= known, section
    declared = {kind: set(jaeger[kind]) for kind in JAEGER_HAS}
    assert set(jaeger["service"]["extensions"]) == declared["extensions"]
    for name, pipeline in jaeger["service"]["pipelines"].items():
        assert set(pipeline["receivers"]) <= declared["receivers"] | declared["connectors"], name
        assert set(pipeline.get("processors", [])) <= declared["processors"], name
        assert set(pipeline["exporters"]) <= declared["exporters"] | declared["connectors"], name
    stores = jaeger["extensions"]["jaeger_storage"]
    assert jaeger["exporters"]["jaeger_storage_exporter"]["trace_storage"] in stores["backends"]
    query = jaeger["extensions"]["jaeger_query"]["storage"]
    assert query["traces"] in stores["backends"]
    assert query["metrics"] in stores["metric_backends"]


def basic_policies(policies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tail sampling policies with those that an ``and`` combines in its place."""
    return [
        basic
        for policy in policies
        for basic in (policy["and"]["and_sub_policy"] if policy["type"] == "and" else [policy])
    ]


def wanted_by(policy: Mapping[str, Any], attributes: Mapping[str, Any]) -> bool:
    """Whether tail sampling would keep a trace whose spans have these attributes, while its budget lasts."""
    kind = policy["type"]
    if kind == "and":
        return all(wanted_by(each, attributes) for each in policy["and"]["and_sub_policy"])
    if kind == "rate_limiting":
        return True
    rule = policy[kind]
    value = attributes.get(rule["key"])
    if kind == "string_attribute":
        return value in rule["values"]
    if kind == "numeric_attribute":
        return value is not None and rule["min_value"] <= value <= rule["max_value"]
    assert kind == "boolean_attribute"
    return value is rule["value"]


REQUESTS = {
    "a failure": ("error", "failed", {"failed-or-slow"}),
    "a timeout": ("timeout", "failed", {"failed-or-slow"}),
    "slower than its class's objective": ("ok", "slow", {"failed-or-slow"}),
    "served": ("ok", "sampled", {"served"}),
    "hung up": ("cancelled", "sampled", {"served"}),
    "shed": ("shed", "shed", {"refused"}),
    "throttled": ("throttled", "sampled", {"refused"}),
    "a 401": ("error", "sampled", {"refused"}),
}


@pytest.mark.parametrize("request_kind", REQUESTS)
def test_jaeger_keeps_what_failed_or_was_slow_and_of_the_refused_only_what_fits(request_kind: str) -> None:
    """A flood of 429s must neither be stored whole nor take the place of requests that were served."""
    outcome, kept, expected = REQUESTS[request_kind]
    policies = read("jaeger.yaml")["processors"]["tail_sampling"]["policies"]
    spans = {"forebay.outcome": outcome, "forebay.kept": kept, "forebay.preemptions": 0}
    assert {policy["name"] for policy in policies if wanted_by(policy, spans)} == expected
    limited = {each["name"]: "rate_limiting" in str(each) for each in policies}
    assert {name: limited[name] for name in ("failed-or-slow", "served", "refused")} == {
        "failed-or-slow": False, "served": True, "refused": True,
    }  # fmt: skip


def test_jaegers_policies_ask_for_attributes_that_spans_have() -> None:
    documented = (ROOT / "docs" / "telemetry.md").read_text()
    jaeger = read("jaeger.yaml")
    policies = basic_policies(jaeger["processors"]["tail_sampling"]["policies"])
    keys = [policy[policy["type"]]["key"] for policy in policies if "key" in policy[policy["type"]]]
    keys += [dimension["name"] for dimension in jaeger["connectors"]["spanmetrics"]["dimensions"]]
    assert len(keys) >= 4
    assert [key for key in keys if f"`{key}`" not in documented] == []
    assert {policy["type"] for policy in policies} <= {
        "status_code", "string_attribute", "numeric_attribute", "boolean_attribute", "latency", "rate_limiting",
    }  # fmt: skip
