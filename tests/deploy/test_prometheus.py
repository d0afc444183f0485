"""The shipped alerts and dashboards in the real Prometheus, which scrapes a live gateway and its worker.

Needs Debian's ``prometheus`` (``apt-get install prometheus``), or its folder in ``FOREBAY_TEST_PROMETHEUS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.arch.source import ROOT
from tests.deploy.stack import DEPLOY, alerts, queries
from tests.gateway.harness import Site, running
from tests.otlp import OtlpReceiver
from workers.testing import Echo

pytestmark = pytest.mark.long

QUIET = {
    "alert: ", "tenants: Turned away per second", "fairness: Behind in virtual time", "engine: Cached blocks given up",
    "latency: Spans per second A", "latency: Parts that failed, per second A",
    "latency: Parts that failed, per second C", "engine: Memory", "engine: Guesses accepted", "engine: Adapters",
    "engine: Tokens computed with", "engine: KV bytes", "engine: Below",
    "engine: Prompt tokens found below", "engine: Blocks moved", "engine: Tier",
    "engine: Waiting for prompts", "engine: Prompts from",
}  # fmt: skip
"""What rightly has no series while all is well, with a worker that has no model."""


def program(name: str) -> str:
    """The path of Prometheus' own program; a clear failure where it is missing: these tests are not left out."""
    folders = [os.environ.get("FOREBAY_TEST_PROMETHEUS", ""), os.environ["PATH"]]
    found = shutil.which(name, path=os.pathsep.join(folders))
    assert found, f"{name} is missing: apt-get install prometheus, or set FOREBAY_TEST_PROMETHEUS to its folder"
    return found


def test_the_rules_are_rules() -> None:
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(DEPLOY / "prometheus" / "alerts.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(ROOT / "tests" / "deploy" / "alerts_test.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextlib.asynccontextmanager
async def prometheus(folder: Path, targets: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """Prometheus with the shipped alerts, scraping ``targets`` (job → host:port) once a second."""
    shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", folder)
    shipped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": shipped["rule_files"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=error",
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30) as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


async def ask(client: httpx.AsyncClient, path: str, **parameters: Any) -> Any:
    """``data`` of an answer; AssertionError with Prometheus' message for anything but success."""
    answer = (await client.get(path, params=parameters)).json()
    assert answer["status"] == "success", (parameters, answer)
    return answer["data"]


async def within(seconds: float, condition: Any) -> Any:
    """The first truthy answer of an async ``condition``."""
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if found := await condition():
                    return found
            await asyncio.sleep(0.2)


async def traffic(site: Site, seconds: float) -> None:
    """Two tenants, one cached prefix, one impatient caller."""
    prompt = list(range(5, 70))
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        calls = [site.complete(tenant, prompt=prompt, max_tokens=20) for tenant in ("alpha", "beta") * 8]
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {200}


async def test_prometheus_scrapes_evaluates_and_answers(tmp_path: Path) -> None:
    objectives = {"slo": {"ttft_p95_ms": 60_000, "itl_p95_ms": 60_000, "queue_wait_p95_ms": 60_000}}
    with OtlpReceiver() as collector:
        changes = {
            "telemetry": {"otlp_endpoint": collector.endpoint},
            "classes": {"interactive": objectives},
            "tenants": [{"id": name, "limits": {"requests_per_minute": 10**6}} for name in ("alpha", "beta")],
        }
        async with running(tmp_path, changes, echo=Echo(step_s=0.005)) as site:
            [worker] = (await site.admin.get("/admin/workers")).json()["workers"]
            targets = {
                "forebay-gateway": site.admin_url.removeprefix("http://"),
                "forebay-worker": f"127.0.0.1:{worker['metrics_port']}",
            }
            async with prometheus(tmp_path, targets) as client:

                async def both_up() -> bool:
                    up = await ask(client, "/query", query="up")
                    return sorted(each["value"][1] for each in up["result"]) == ["1", "1"]

                await within(30, both_up)
                await traffic(site, 12)
                for group in (await ask(client, "/rules"))["groups"]:
                    for rule in group["rules"]:
                        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
                        assert rule["state"] != "firing", rule["name"]
                empty = []
                for where, query in queries().items():
                    found = (await ask(client, "/query", query=query))["result"]
                    if not found and not any(where.startswith(quiet) for quiet in QUIET):
                        empty.append(where)
                assert empty == []
                exemplars = await ask(
                    client, "/query_exemplars", query="forebay_time_to_first_token_seconds_bucket",
                    start="2000-01-01T00:00:00Z", end="2100-01-01T00:00:00Z",
                )  # fmt: skip
        linked = {each["labels"]["trace_id"] for series in exemplars for each in series["exemplars"]}
        assert linked
        assert linked <= set(collector.traces()), "an exemplar of a trace that was not exported"
