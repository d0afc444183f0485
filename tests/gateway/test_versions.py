"""The info metric and the resource attributes: what real workers told of themselves, in both processes."""

from __future__ import annotations

import asyncio
import platform
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from gateway.version import version
from gateway.versions import of_worker
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, pool, until
from tests.otlp import OtlpReceiver
from workers.protocol import PROTOCOL, Hello
from workers.testing import Echo

OWN = {"forebay": version(), "python": platform.python_version()}


def builds(text: str) -> list[dict[str, str]]:
    """The labels of every ``forebay_build_info``."""
    families = text_string_to_metric_families(text)
    return [
        dict(sample.labels) for family in families for sample in family.samples if sample.name == "forebay_build_info"
    ]


async def scraped(site: Site) -> list[dict[str, str]]:
    """Those of the gateway."""
    return builds((await site.admin.get("/metrics")).text)


def of(port: int) -> list[dict[str, str]]:
    """Those of the worker that listens there."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return builds(answer.read().decode())


async def test_what_a_worker_told_is_in_the_info_metric_and_in_both_resources(start: Start) -> None:
    with OtlpReceiver() as collector:
        changes = {"telemetry": {"otlp_endpoint": collector.endpoint}, "models": [pool(count=2)]}
        async with start(changes, echo=Echo(load_s=1.5, revision="sha256:beef"), ready=False) as site:
            assert await scraped(site) == [OWN], "nobody has said hello"
            await until(lambda: len(site.dispatcher.workers) == 2, "both are ready")
            handle = site.dispatcher.workers[0]
            assert handle.hello is not None
            told = {"model_revision": "sha256:beef", "device": "cpu", "dtype": "float32"}
            assert await scraped(site) == [{**OWN, "model": MODEL, **told}], "equal workers share a series"
            (worker,) = await asyncio.to_thread(of, handle.hello.metrics_port)
            assert worker == told
            assert (await site.complete()).status_code == 200
            assert site.gateway.parts.telemetry.flush(10)
        resources = {span.service: span.resource for span in collector.spans()}
    for name, value in told.items():
        assert resources["forebay-worker"][f"forebay.version.{name}"] == value
    for name, value in OWN.items():
        assert resources["forebay-gateway"][f"forebay.version.{name}"] == value


async def test_workers_that_differ_have_a_series_each(start: Start) -> None:
    async with start({"models": [pool(), {**pool(), "name": "other"}]}) as site:
        assert sorted(build["model"] for build in await scraped(site)) == [MODEL, "other"]


def test_a_worker_cannot_spoil_the_page() -> None:
    """Its packages' names become label names: what is none is left out; values are cut."""
    versions = {"torch": "2", "a b": "1", 'x="': "1", "": "1", "9": "1", "long": "v" * 10_000}
    told = of_worker(Hello(PROTOCOL, "w", "m", "r", "", 16, 1, 1, 1, versions=versions))
    assert told == {
        "model": "m", "model_revision": "r", "device": "cpu", "dtype": "float32", "worker_torch": "2",
        "worker_long": "v" * 128,
    }  # fmt: skip
