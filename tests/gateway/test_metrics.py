"""The gateway's metrics: bounded series, gauges asked for at the scrape, exemplars of kept traces, OpenMetrics."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from gateway.gauges import Gauges, QuotaGauge, ServiceWindow, TenantGauge, WorkerGauge, jain
from gateway.log import RequestSummary
from gateway.metrics import Metrics
from policies.types import Charge, Usage
from tests.gateway import tracing

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def summary(**fields: Any) -> RequestSummary:
    """A request that went well."""
    defaults: dict[str, Any] = {
        "request_id": "req-1", "route": tracing.ROUTE, "outcome": "ok", "duration_s": 2.0, "status": 200,
        "trace_id": "a" * 32, "trace_kept": True, "tenant": "search", "service_class": "interactive", "model": "tiny",
        "usage": Usage(prompt=3, output=5), "queue_wait_s": 0.2, "first_token_s": 0.3,
    }  # fmt: skip
    return RequestSummary(**{**defaults, **fields})


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample."""
    labels = {key.rstrip("_"): text for key, text in labels.items()}
    return metrics.registry.get_sample_value(f"forebay_{name}", labels)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(tracing.settings())


def test_a_request_is_counted_once_with_its_times(metrics: Metrics) -> None:
    metrics.request_finished(summary())
    metrics.request_finished(summary(outcome="shed", reason="queue_full", queue_wait_s=None, first_token_s=None))
    where = {"tenant": "search", "class_": "interactive", "model": "tiny"}
    assert value(metrics, "requests_total", outcome="ok", **where) == 1
    assert value(metrics, "requests_total", outcome="shed", **where) == 1
    assert value(metrics, "shed_total", tenant="search", class_="interactive", reason="queue_full") == 1
    assert value(metrics, "queue_wait_seconds_sum", model="tiny", class_="interactive") == 0.2
    assert value(metrics, "time_to_first_token_seconds_count", model="tiny", class_="interactive") == 1
    assert value(metrics, "request_duration_seconds_sum", model="tiny", class_="interactive") == 4.0


def test_counters(metrics: Metrics) -> None:
    metrics.charged("search", "interactive", Charge(prompt=3, cached=2))
    metrics.charged("search", "interactive", Charge(output=4))
    metrics.quota_decided("search", "interactive", "throttle")
    metrics.routed("local-0", "prefix")
    metrics.client_disconnected()
    metrics.fault("routing")
    metrics.stale_dispatch("local-0")
    metrics.inter_token("tiny", "interactive")(0.02)
    metrics.policy_timer("scheduling/vtc")(1e-5)
    who = {"tenant": "search", "class_": "interactive"}
    assert value(metrics, "service_tokens_total", kind="prompt", **who) == 3
    assert value(metrics, "service_tokens_total", kind="cached", **who) == 2
    assert value(metrics, "service_tokens_total", kind="output", **who) == 4
    assert value(metrics, "quota_decisions_total", decision="throttle", **who) == 1
    assert value(metrics, "route_decisions_total", worker="local-0", reason="prefix") == 1
    assert value(metrics, "client_disconnects_total") == 1
    assert value(metrics, "isolated_faults_total", part="routing") == 1
    assert value(metrics, "stale_worker_dispatches_total", worker="local-0") == 1
    assert value(metrics, "inter_token_latency_seconds_count", model="tiny", class_="interactive") == 1
    assert value(metrics, "policy_seconds_sum", policy="scheduling/vtc") == 1e-5


def series(metrics: Metrics) -> int:
    """Samples of a whole scrape."""
    return sum(len(family.samples) for family in metrics.registry.collect())


def test_random_names_leave_the_series_bounded(metrics: Metrics) -> None:
    """100,000 random tenants, models, classes, reasons and workers."""

    def gauges() -> Gauges:
        return Gauges(tenants=[TenantGauge(f"t{i}", 1, 10, 0.5, 0.001, "tiny") for i in range(1_000)])

    metrics.add_source(gauges)

    def noise(first: int, count: int) -> None:
        for i in range(first, first + count):
            name = f"random-{i}"
            metrics.request_finished(
                summary(tenant=name, model=name, service_class=name, outcome="shed", reason=name, trace_kept=False)
            )
            metrics.charged(name, name, Charge(1, 1, 1))
            metrics.quota_decided(name, name, name)
            metrics.routed(name, name)
            metrics.policy_timer(name)(0.1)

    noise(0, 1_000)
    bounded = series(metrics)
    noise(1_000, 99_000)
    assert series(metrics) == bounded
    assert bounded < 20_000
    other = {"tenant": "other", "class_": "other"}
    assert value(metrics, "requests_total", model="other", outcome="shed", **other) == 100_000
    assert value(metrics, "service_tokens_total", kind="output", **other) == 100_000
    assert value(metrics, "queue_depth", **other) == 1_000


def test_a_reload_changes_what_is_known(metrics: Metrics) -> None:
    bigger = tracing.settings().model_dump(by_alias=True)
    bigger["tenants"] = [*bigger["tenants"], {"id": "new", "weight": 9}]
    metrics.configure(type(tracing.settings()).model_validate(bigger))
    metrics.request_finished(summary(tenant="new"))
    assert value(metrics, "requests_total", tenant="new", class_="interactive", model="tiny", outcome="ok") == 1
    assert value(metrics, "weight", tenant="new", class_="interactive") == 9


def test_gauges_come_from_their_owners_at_the_scrape(metrics: Metrics) -> None:
    depth = 3

    def queue() -> Gauges:
        return Gauges(tenants=[TenantGauge("search", depth, 100, 2.5)], stalled={"tiny": depth == 4})

    def rest() -> Gauges:
        return Gauges(
            tenants=[TenantGauge("search", 1, 5)],
            workers=[WorkerGauge("local-0", True, 2, 1, {"free": 5, "cached": 6, "used": 7}), WorkerGauge("w1", False)],
            quotas=[QuotaGauge("search", "tokens", 99.5)],
        )

    metrics.add_source(queue)
    metrics.add_source(rest)
    who = {"tenant": "search", "class_": "interactive"}
    assert value(metrics, "queue_depth", **who) == 4, "queues of several models add up"
    assert value(metrics, "queue_tokens", **who) == 105
    assert value(metrics, "queue_depth", tenant="batch", class_="interactive") == 0
    assert value(metrics, "virtual_time_lag", **who) == 2.5
    assert value(metrics, "quota_remaining", limit="tokens", **who) == 99.5
    assert value(metrics, "weight", **who) == 4
    assert value(metrics, "worker_up", worker="local-0") == 1
    assert value(metrics, "worker_up", worker="w1") == 0
    assert value(metrics, "worker_running", worker="local-0") == 2
    assert value(metrics, "worker_waiting", worker="local-0") == 1
    assert value(metrics, "worker_kv_blocks", worker="local-0", state="cached") == 6
    assert value(metrics, "stalled", model="tiny") == 0
    depth = 4
    assert value(metrics, "stalled", model="tiny") == 1


def test_shares_by_model_count_competitors_at_that_model_only(metrics: Metrics) -> None:
    """Over both models batch has most of all tokens; at each it has just its part, and search sees no rival there."""

    def tiny() -> Gauges:
        tenants = [TenantGauge("search", 2, 10, None, 0.8, "tiny"), TenantGauge("batch", 0, 0, None, 0.2, "tiny")]
        return Gauges(tenants=[*tenants, TenantGauge("gone", 0, 0, None, 1e-9, "tiny")])

    def large() -> Gauges:
        return Gauges(tenants=[TenantGauge("batch", 3, 10, None, 1.0, "large")])

    metrics.add_source(tiny)
    metrics.add_source(large)

    def of(name: str, model: str, tenant: str) -> float | None:
        return value(metrics, name, model=model, tenant=tenant, class_="interactive")

    assert [of("model_due_share", "tiny", tenant) for tenant in ("search", "batch")] == [0.8, 0.2]
    assert [of("model_service_share", "tiny", tenant) for tenant in ("search", "batch")] == [0.8, 0.2]
    assert (of("model_due_share", "large", "batch"), of("model_queue_depth", "large", "batch")) == (1.0, 3)
    assert of("model_due_share", "large", "search") is None
    assert value(metrics, "model_due_share", model="tiny", tenant="other", class_="other") is None


def test_who_is_not_expected_to_answer_yet_has_no_series(metrics: Metrics) -> None:
    metrics.add_source(lambda: Gauges(workers=[WorkerGauge("starts", None), WorkerGauge("gone", False)]))
    assert value(metrics, "worker_up", worker="starts") is None
    assert value(metrics, "worker_up", worker="gone") == 0


def test_a_failing_source_hides_only_itself(metrics: Metrics) -> None:
    def broken() -> Gauges:
        raise RuntimeError("prompt text")

    metrics.add_source(broken)
    metrics.add_source(lambda: Gauges(workers=[WorkerGauge("local-0", True)]))
    assert value(metrics, "worker_up", worker="local-0") == 1
    assert (value(metrics, "gauge_source_errors_total") or 0) >= 1


def test_shares_and_fairness_over_the_last_minute() -> None:
    clock = Clock()
    metrics = Metrics(tracing.settings(), clock=clock)
    assert value(metrics, "fairness_jain") == 1.0
    metrics.charged("search", "interactive", Charge(prompt=100, output=300))
    metrics.charged("batch", "interactive", Charge(output=100))
    assert value(metrics, "service_share", tenant="search", class_="interactive") == 0.8
    assert value(metrics, "fairness_jain") == pytest.approx(1.0), "4:1 is fair by weights 4:1"
    clock.now = 61.0
    metrics.charged("batch", "interactive", Charge(output=100))
    assert value(metrics, "service_share", tenant="search", class_="interactive") == 0.0
    metrics.add_source(lambda: Gauges(tenants=[TenantGauge("search", 1, 10)]))
    assert value(metrics, "fairness_jain") == pytest.approx(0.5), "one waits and gets nothing"


def test_the_window_is_bounded() -> None:
    clock = Clock()
    window = ServiceWindow(clock, seconds=60)
    for second in range(10_000):
        clock.now = float(second)
        window.add("a", 1)
    assert window.totals() == {"a": 60}
    assert jain([1, 1, 1, 1]) == 1.0
    assert jain([4, 0, 0, 0]) == 0.25


def test_both_formats_parse_and_exemplars_need_openmetrics(metrics: Metrics) -> None:
    metrics.request_finished(summary(trace_id="b" * 32))
    metrics.request_finished(summary(trace_id="c" * 32, trace_kept=False, duration_s=100.0))
    body, content_type = metrics.render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics_families(body.decode())}
    traces = {
        sample.exemplar.labels["trace_id"]
        for sample in families["forebay_request_duration_seconds"].samples
        if sample.exemplar
    }
    assert traces == {"b" * 32}, "only kept traces can be looked up"
    body, content_type = metrics.render("text/html, */*")
    assert content_type.startswith("text/plain")
    assert "trace_id" not in body.decode()
    assert {family.name for family in text_families(body.decode())} >= {"forebay_requests", "forebay_queue_depth"}
    assert "_created" not in body.decode()


async def test_a_late_event_loop_shows(metrics: Metrics) -> None:
    """gateway F7: what happens before our handler runs is seen as the loop's lag."""
    task = asyncio.create_task(metrics.watch_loop(0.01))
    await asyncio.sleep(0.03)
    import time

    time.sleep(0.25)
    await asyncio.sleep(0.03)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    slow = value(metrics, "event_loop_lag_seconds_count") or 0
    fast = value(metrics, "event_loop_lag_seconds_bucket", le="0.1") or 0
    assert slow - fast >= 1
