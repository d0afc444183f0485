"""What ships for Jaeger, Prometheus and Grafana fits together and asks only for what the processes really expose.

Docker is not needed here: structure, names and queries are checked, the queries against a live gateway and worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest

from gateway.config_file import load
from tests.arch.source import ROOT
from tests.deploy.stack import CONFIG, DASHBOARDS, DEPLOY, alerts, generator, panels, queries, read
from tests.gateway.harness import running
from tests.gateway.test_telemetry_docs import GATEWAY, WORKER, names

FORMAT = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "info": ("",)}
SCRAPE_LABELS = {"instance", "job"}
"""What Prometheus adds."""
JAEGER_HAS = {
    "receivers": {"otlp", "jaeger", "kafka", "zipkin", "nop"},
    "processors": {"batch", "memory_limiter", "tail_sampling", "adaptive_sampling", "attributes", "filter"},
    "exporters": {"jaeger_storage_exporter", "prometheus", "otlp", "otlphttp", "debug", "kafka", "nop"},
    "connectors": {"spanmetrics", "forward"},
    "extensions": {"jaeger_storage", "jaeger_query", "healthcheckv2", "remote_sampling", "pprof", "zpages", "expvar"},
}
"""Components built into Jaeger v2 (its cmd/jaeger/internal/components.go)."""


def exposed() -> dict[str, set[str]]:
    """Every series that docs/telemetry.md names, with its labels; the page is held to the code by another test."""
    found: dict[str, set[str]] = {}
    for table in (GATEWAY, WORKER):
        for row in table[1:]:
            for suffix in FORMAT[row[1]]:
                labels = names(row[2]) | SCRAPE_LABELS | ({"le"} if suffix == "_bucket" else set())
                found[names(row[0]).pop() + suffix] = labels
    return found


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """(series, labels asked for) of every selector; raises ValueError for what is no PromQL."""
    found: list[tuple[str, set[str]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((str(node.name), {matcher.name for matcher in node.matchers.matchers}))

    promql_parser.walk(promql_parser.parse(expression), pre_visit=visit)
    return found


@pytest.mark.parametrize("where", queries())
def test_a_query_asks_for_what_there_is(where: str) -> None:
    series = exposed()
    asked = selectors(queries()[where])
    assert asked
    together: set[str] = set(SCRAPE_LABELS)
    for name, labels in asked:
        if name == "up":
            continue
        assert name in series, f"{name} is exposed nowhere"
        assert labels <= series[name], f"{name} has no label {labels - series[name]}"
        together |= series[name]
    grouped = re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", queries()[where])
    wanted = {label.strip() for group in grouped for label in group.split(",")}
    assert wanted <= together, f"grouped by {wanted - together}, which no series here has"


def test_legends_and_summaries_name_labels_that_survive_the_query() -> None:
    """``{{tenant}}`` of a query that sums tenants away would stay empty."""
    shown = [
        (f"{name} {target['refId']}", set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])))
        for name, panel in panels()
        for target in panel["targets"]
    ]
    shown += [
        (f"alert: {rule['alert']}", set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])))
        for rule in alerts()
    ]
    for where, labels in shown:
        query = queries()[where]
        grouped = re.search(r"\bby \(([^)]*)\)", query)
        outer = query.startswith(("sum by", "histogram_quantile", "max by"))
        kept = {label.strip() for label in grouped[1].split(",")} if grouped and outer else None
        assert kept is None or labels <= kept, where


async def test_a_live_gateway_and_its_worker_expose_every_metric_that_is_asked_for(tmp_path: Path) -> None:
    objectives = {"slo": {"ttft_p95_ms": 1, "queue_wait_p95_ms": 1}}
    async with running(tmp_path, {"classes": {"interactive": objectives}}) as site:
        assert (await site.complete()).status_code == 200
        await site.at_rest()
        pages = [(await site.admin.get("/metrics")).text]
        [worker] = (await site.admin.get("/admin/workers")).json()["workers"]
        async with httpx.AsyncClient() as client:
            pages.append((await client.get(f"http://127.0.0.1:{worker['metrics_port']}/metrics")).text)
    assert 'forebay_evictions_total{reason="over_share"} 0.0' in pages[1], "the pool's own counts"
    families = {line.split(" ")[2] for page in pages for line in page.splitlines() if line.startswith("# TYPE ")}
    asked = {name for query in queries().values() for name, _ in selectors(query)} - {"up"}
    parts = {f"{family}_{part}" for family in families for part in ("bucket", "sum", "count")}
    assert asked - families - parts == set()


def test_every_metric_is_in_a_dashboard_or_an_alert() -> None:
    asked = {name for query in queries().values() for name, _ in selectors(query)}
    drawn = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} | asked
    documented = {names(row[0]).pop() for table in (GATEWAY, WORKER) for row in table[1:]}
    assert documented - drawn == {"forebay_build_info"}, "which is there to be joined with"


def test_every_alert_of_the_issue_is_there_and_says_what_to_do() -> None:
    named = {rule["alert"] for rule in alerts()}
    assert named >= {
        "ForebayShareOff", "ForebayQueueWaitOverObjective", "ForebayFirstTokenOverObjective",
        "ForebayTokensOverObjective", "ForebayPreemptionStorm", "ForebayStalled", "ForebayKvNearlyFull",
        "ForebayWorkerDown", "ForebayLedgerNotWritable", "ForebayCollectorDropping",
    }  # fmt: skip
    page = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []
    assert {rule["labels"]["severity"] for rule in alerts()} == {"warning", "critical"}


def test_the_dashboards_are_what_the_script_writes() -> None:
    written = generator()
    assert (
        {path.stem for path in DASHBOARDS} == set(written["DASHBOARDS"]) == {"fairness", "tenants", "latency", "engine"}
    )
    for path in DASHBOARDS:
        assert path.read_text() == written["text"](path.stem), "run: scripts/dashboards"


def test_dashboards_have_a_source_and_places_that_do_not_overlap() -> None:
    [source, jaeger] = read("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["jsonData"]["exemplarTraceIdDestinations"][0]["datasourceUid"] == jaeger["uid"]
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            assert panel["datasource"]["uid"] == source["uid"]
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            assert all(x < 24 for x, _ in cells)
            taken |= cells


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


def test_the_compose_file_mounts_what_exists_and_wires_ports_that_are_served() -> None:
    compose = read("deploy/compose.yaml")
    services: Mapping[str, Any] = compose["services"]
    assert set(services) == {"gateway", "worker", "jaeger", "prometheus", "grafana"}
    known = {
        "build", "image", "command", "environment", "volumes", "ports", "depends_on", "stop_grace_period", "restart",
        "healthcheck", "secrets",
    }  # fmt: skip
    for name, service in services.items():
        assert set(service) <= known, name
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            exists = (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert exists, f"{name}: {source}"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), f"{name} is open to the network"
    for name in ("gateway", "worker"):
        assert (DEPLOY / services[name]["build"]["context"]).resolve() == ROOT
        assert (ROOT / services[name]["build"]["dockerfile"]).exists()
    assert services["gateway"]["image"] == services["worker"]["image"]
    secrets = set(re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose.yaml").read_text()))
    assert secrets == {line.split("=")[0] for line in (DEPLOY / ".env.example").read_text().splitlines() if "=" in line}


def test_the_parts_find_each_other() -> None:
    services = read("deploy/compose.yaml")["services"]
    settings = load(DEPLOY / "gateway.yaml").settings
    command = services["worker"]["command"]
    told = dict(zip(command[1::2], command[2::2], strict=True))
    [address] = settings.models[0].pools[0].launch.addresses
    assert address == f"worker:{told['--listen'].split(':')[1]}"
    assert (told["--source"], told["--model"]) == (settings.models[0].source, settings.models[0].name)
    jobs = {job["job_name"]: job for job in read("deploy/prometheus/prometheus.yaml")["scrape_configs"]}
    targets = {name: job["static_configs"][0]["targets"] for name, job in jobs.items()}
    assert targets["forebay-gateway"] == [f"gateway:{settings.admin.port}"]
    assert targets["forebay-worker"] == [f"worker:{told['--metrics-port']}"]
    jaeger = read("jaeger.yaml")
    assert targets["jaeger-spans"] == [f"jaeger:{jaeger['exporters']['prometheus']['endpoint'].split(':')[1]}"]
    assert settings.telemetry.otlp_endpoint == services["worker"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert settings.telemetry.otlp_endpoint.endswith(jaeger["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"][-5:])
    credentials = jobs["forebay-gateway"]["authorization"]["credentials_file"]
    assert credentials == f"/run/secrets/{services['prometheus']['secrets'][0]}"


def test_the_jobs_of_the_alerts_are_scraped() -> None:
    jobs = {job["job_name"] for job in read("deploy/prometheus/prometheus.yaml")["scrape_configs"]}
    asked = set(re.findall(r'job="([^"]+)"', (DEPLOY / "prometheus" / "alerts.yaml").read_text()))
    assert asked
    assert asked <= jobs
    assert (CONFIG / "jaeger.yaml").exists()
