"""What ships for Jaeger, Prometheus and Grafana fits together and asks only for what the processes really expose.

Docker is not needed here: structure, names and queries are checked, the queries against a live gateway and worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard, units

from gateway.config_file import load
from tests.arch.source import ROOT
from tests.deploy.stack import CONFIG, DASHBOARDS, DEPLOY, alerts, generator, panels, queries, read
from tests.gateway.harness import running
from tests.gateway.test_telemetry_docs import GATEWAY, WORKER, names

FORMAT = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "info": ("",)}
SCRAPE_LABELS = {"instance", "job"}
"""What Prometheus adds."""


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


async def test_a_live_gateway_and_its_worker_expose_every_metric(tmp_path: Path) -> None:
    """Those that are documented, thus those of the contract, and with them all that dashboards and alerts ask for."""
    changes = {
        "classes": {"interactive": {"slo": {"ttft_p95_ms": 1, "queue_wait_p95_ms": 1}}},
        "policies": {"quota": {"use": "ledger"}},
        "state": {"path": "state"},
    }
    async with running(tmp_path, changes) as site:
        assert (await site.complete()).status_code == 200
        await site.at_rest()
        pages = [(await site.admin.get("/metrics")).text]
        [worker] = (await site.admin.get("/admin/workers")).json()["workers"]
        async with httpx.AsyncClient() as client:
            pages.append((await client.get(f"http://127.0.0.1:{worker['metrics_port']}/metrics")).text)
    assert 'forebay_evictions_total{reason="over_share"} 0.0' in pages[1], "the pool's own counts"
    families = {line.split(" ")[2] for page in pages for line in page.splitlines() if line.startswith("# TYPE ")}
    by_process = [{line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE ")} for page in pages]
    for table, exposed_there in zip((GATEWAY, WORKER), by_process, strict=True):
        assert {names(row[0]).pop() for row in table[1:]} - exposed_there == set()
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


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_what_grafana_knows(path: Path) -> None:
    """Read by Grafana's own published types and written again it is the same: no key or value of it gets lost."""
    known_units = {value for value in vars(units).values() if isinstance(value, str)}
    register_default_plugins()  # or queries and panels' options would pass as they are, whatever they hold
    board = json.loads(path.read_text())
    known = json.loads(json.dumps(dashboard.Dashboard.from_json(board), cls=JSONEncoder))
    assert list(lost(board, known)) == []
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in board["panels"]} <= known_units
    misspelt = {**board["panels"][0], "gridPoz": {}}
    again = json.loads(json.dumps(dashboard.Panel.from_json(misspelt), cls=JSONEncoder))
    assert list(lost(misspelt, again)) == [".gridPoz"]


def lost(value: Any, known: Any, path: str = "") -> Iterator[str]:
    """Where ``known`` lacks something of ``value``."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key not in known:
                yield f"{path}.{key}"
            else:
                yield from lost(below, known[key], f"{path}.{key}")
    elif isinstance(value, list) and isinstance(known, list) and len(value) == len(known):
        for index, (below, other) in enumerate(zip(value, known, strict=True)):
            yield from lost(below, other, f"{path}[{index}]")
    elif value != known:
        yield path


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
