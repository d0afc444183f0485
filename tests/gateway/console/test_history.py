"""The ring of samples, the requests that ended lately, and the quantiles."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.console_requests import trace_url
from gateway.gauges import ServiceWindow
from gateway.history import COLOURS, MAX_TENANTS, WINDOW_S, BucketWindow, History, _standings
from gateway.log import RequestSummary
from gateway.metrics import Buckets, Metrics
from gateway.recent import RecentRequests
from gateway.settings import Settings
from gateway.tenants import Tenants
from policies.types import Charge

BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def buckets(values: Sequence[float]) -> Buckets:
    """As Prometheus counts them."""
    counts = [sum(value <= bound for value in values) for bound in BOUNDS]
    return Buckets(BOUNDS, (*counts, len(values)))


def settings(tenants: int = 3) -> Settings:
    return Settings.model_validate(
        {
            "policies": {"auth": {"use": "none", "with": {"tenant": "t0"}}},
            "tenants": [{"id": f"t{n}", "weight": n + 1} for n in range(tenants)],
            "models": [{"name": "m", "source": "x", "pools": [{"name": "p"}]}],
        }
    )


def summary(outcome: str = "ok", tenant: str = "t0", duration_s: float = 1.0) -> RequestSummary:
    return RequestSummary("id", "/v1/completions", outcome, duration_s, tenant=tenant)  # type: ignore[arg-type]


class Rig:
    """A history over real metrics, with clocks to turn."""

    def __init__(self, tenants: int = 3, keep_s: int = 900) -> None:
        self.now = 1000.0
        config = settings(tenants)
        self.metrics = Metrics(config, clock=lambda: self.now)
        self.recent = RecentRequests(self.metrics.tenant, clock=lambda: self.now)
        self.history = History(self.metrics, Tenants(config), {}, self.recent, keep_s=keep_s, clock=lambda: self.now)

    def serve(self, tenant: str, tokens: int) -> None:
        self.metrics.charged(tenant, "interactive", Charge(output=tokens))


@given(st.lists(st.floats(0.001, 1.99), min_size=20, max_size=200))
def test_quantiles_lie_in_the_bucket_of_the_true_ones(values: list[float]) -> None:
    window = BucketWindow()
    window.push(buckets([]))
    found = window.push(buckets(values))
    assert found is not None
    edges = (0.0, *BOUNDS)
    for q, guess in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        true = sorted(values)[max(0, -int(-q * len(values) // 1) - 1)]
        upper = next(edge for edge in edges if true <= edge)
        lower = edges[edges.index(upper) - 1]
        assert lower <= guess <= upper
    assert found.p50 <= found.p95 <= found.p99


def test_beyond_the_last_bound_is_the_last_bound() -> None:
    window = BucketWindow()
    window.push(buckets([]))
    found = window.push(buckets([60.0]))
    assert found is not None
    assert found.p50 == BOUNDS[-1]


def test_what_is_older_than_the_window_does_not_count() -> None:
    window, values = BucketWindow(seconds=3), [0.9] * 100
    window.push(buckets([]))
    assert window.push(buckets(values)) is not None
    assert window.push(buckets(values)) is not None
    assert window.push(buckets(values)) is not None
    assert window.push(buckets(values)) is None, "all of it was four seconds ago"
    found = window.push(buckets([*values, 0.015]))
    assert found is not None
    assert found.p99 <= 0.02


def test_the_first_observation_counts_although_there_were_no_series_before() -> None:
    window = BucketWindow()
    assert window.push(Buckets((), ())) is None
    assert window.push(buckets([0.3])) is not None


def test_real_histograms_feed_it() -> None:
    rig = Rig()
    assert rig.history.take().first_token is None
    values = [random.Random(7).uniform(0.2, 0.4) for _ in range(300)]
    observe = rig.metrics.inter_token("m", "interactive")
    for value in values:
        observe(value)
        rig.metrics.request_finished(
            RequestSummary("i", "/", "ok", 1.0, model="m", service_class="interactive", first_token_s=value)
        )
    sample = rig.history.take()
    assert sample.first_token is not None
    assert sample.between_tokens is not None
    assert sample.first_token.p50 == pytest.approx(statistics.median(values), abs=0.05)
    assert 0.2 <= sample.between_tokens.p50 <= 0.5


def test_shares_entitlement_and_jain() -> None:
    rig = Rig()
    assert rig.history.take().fairness is None
    rig.serve("t0", 100)
    assert rig.history.take().fairness is None, "one alone is neither fair nor unfair"
    rig.serve("t1", 200)
    sample = rig.history.take()
    assert sample.fairness == pytest.approx(1.0), "weights 1 and 2 had 100 and 200"
    for name, part in (("t0", 1 / 3), ("t1", 2 / 3)):
        assert sample.standings[name].share == pytest.approx(part)
        assert sample.standings[name].entitled == pytest.approx(part)
    rig.serve("t0", 500)
    unfair = rig.history.take()
    assert unfair.fairness is not None
    assert unfair.fairness == pytest.approx((600 + 100) ** 2 / (2 * (600**2 + 100**2)))
    rig.now += WINDOW_S + 1
    assert rig.history.take().standings == {}


def test_the_ring_is_bounded_and_so_is_a_sample() -> None:
    rig = Rig(tenants=100, keep_s=5)
    for n in range(100):
        rig.serve(f"t{n}", 1000 - n)
        rig.serve(f"stranger-{n}", 1)
    for _ in range(9):
        rig.now += 1
        sample = rig.history.take()
    assert len(rig.history.samples) == 5
    assert len(sample.standings) == MAX_TENANTS
    assert sum(rig.history.colour(f"t{n}") is not None for n in range(100)) == COLOURS
    assert sum(s.entitled for s in _standings({"a": 1}, {"a": 1.0, "b": 3.0}).values()) == 1


def test_tokens_per_second_are_those_of_whole_seconds() -> None:
    now = [10.2]
    window = ServiceWindow(lambda: now[0])
    window.add("a", 50)
    assert window.recent(5) == 0, "the second is not over"
    now[0] = 11.1
    window.add("a", 1)
    assert window.recent(5) == 50
    now[0] = 15.9
    assert window.recent(5) == 51
    now[0] = 17.0
    assert window.recent(5) == 0


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abc"), st.integers(1, 100)), max_size=60))
def test_the_windows_totals_are_the_sum_of_what_is_young(steps: list[tuple[float, str, int]]) -> None:
    """They are kept as they change; here they are added up anew."""
    now, events = [100.0], []
    window = ServiceWindow(lambda: now[0], seconds=20)
    for wait, tenant, tokens in steps:
        now[0] += wait
        window.add(tenant, tokens)
        events.append((int(now[0]), tenant, tokens))
        young = [(name, n) for second, name, n in events if second > int(now[0]) - 20]
        assert window.totals() == {name: sum(n for other, n in young if other == name) for name, _ in young}


def test_refusals_of_the_last_minute() -> None:
    rig = Rig()
    rig.history.take()
    rig.recent.add(summary("shed"))
    rig.recent.add(summary("throttled"))
    rig.recent.add(summary("throttled", tenant="stranger"))
    sample = rig.history.take()
    assert (sample.shed, sample.throttled) == (1, 2)
    assert (rig.recent.refused("t0"), rig.recent.refused("other")) == (2, 1)
    for _ in range(WINDOW_S + 1):
        sample = rig.history.take()
    assert (sample.shed, sample.throttled) == (0, 0)


def test_recent_requests_are_bounded_and_sorted() -> None:
    now = [0.0]
    recent = RecentRequests(lambda tenant: tenant or "other", keep=10, clock=lambda: now[0])
    for n in range(25):
        now[0] = float(n)
        recent.add(summary(duration_s=float(n % 7)))
    assert len(recent) == 10
    found = recent.slowest(3, within_s=5)
    assert [ended.summary.duration_s for ended in found] == [6.0, 5.0, 3.0]
    assert all(ended.at >= 19 for ended in found)
    assert recent.total("ok") == 25


@pytest.mark.parametrize(
    ("template", "url"),
    [
        (None, None),
        ("http://jaeger:16686", "http://jaeger:16686/trace/ab"),
        ("http://jaeger:16686/", "http://jaeger:16686/trace/ab"),
        ("https://x/t?id={trace_id}&{y}", "https://x/t?id=ab&{y}"),
    ],
)
def test_trace_links(template: str | None, url: str | None) -> None:
    assert trace_url(template, "ab") == url
    assert trace_url(template, "") is None


def test_a_template_that_is_no_web_address_is_refused() -> None:
    """It becomes a link: ``javascript:`` would run in the operator's browser."""
    config = settings().model_dump(by_alias=True) | {"telemetry": {"jaeger_ui": "javascript:alert(1)"}}
    with pytest.raises(ValueError, match="jaeger_ui"):
        Settings.model_validate(config)


async def test_a_failing_sample_does_not_end_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    rig = Rig()
    takes = []

    def take() -> None:
        takes.append(1)
        raise RuntimeError("broken")

    monkeypatch.setattr(rig.history, "take", take)
    rig.now = 0.999
    task = asyncio.create_task(rig.history.run())
    try:
        async with asyncio.timeout(30):
            while len(takes) < 3:
                await asyncio.sleep(0.001)
    finally:
        task.cancel()
