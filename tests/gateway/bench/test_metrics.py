"""The arithmetic of figures, against examples done by hand and against the standard library."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench.load import Timeline
from gateway.bench.metrics import Slo, by_tenant, gaps, percentile, summarise, tpot, ttft


def line(name: str, submitted: float, *times: float, given: int = 10, **fields: object) -> Timeline:
    made = Timeline(name, given, submitted, list(times))
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def test_percentile_by_hand() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1
    assert percentile(values, 0.5) == 2.5
    assert percentile(values, 0.95) == pytest.approx(3.85)
    assert percentile(values, 1) == 4
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
def test_percentile_is_the_standard_librarys_inclusive_method(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, 0.5) == pytest.approx(statistics.median(values))
    assert percentile(values, 0.95) == pytest.approx(cuts[94], abs=1e-6)
    assert percentile(values, 0.99) == pytest.approx(cuts[98], abs=1e-6)


@pytest.mark.parametrize("q", [-0.01, 1.01])
def test_percentile_refuses_what_is_no_share(q: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        percentile([1.0], q)


def test_times_of_one_request() -> None:
    one = line("a", 1.0, 1.5, 1.6, 1.9)
    assert ttft(one) == pytest.approx(0.5)
    assert gaps(one) == pytest.approx([0.1, 0.3])
    assert tpot(one) == pytest.approx(0.2)
    assert tpot(line("b", 0, 1.0)) is None


def test_tpot_goes_by_the_servers_count_where_messages_held_several_tokens() -> None:
    assert tpot(line("a", 0, 1.0, 2.0, output_tokens=5)) == pytest.approx(0.25)


def test_a_run_by_hand() -> None:
    lines = [
        line("a", 0.0, 0.1, 0.2, 0.3, cached=4, scheduled=0.02, finished=0.3),
        line("b", 0.0, 0.3, 0.5, 1.0, cached=0, scheduled=0.04, finished=1.0),
    ]
    figures = summarise(lines)
    assert figures["duration_s"] == 1
    assert (figures["output_tokens_s"], figures["total_tokens_s"]) == (6, 26)
    assert (figures["ttft_p50_ms"], figures["ttft_max_ms"]) == (200, 300)
    assert figures["itl_p50_ms"] == 150
    assert figures["itl_max_ms"] == 500
    assert figures["queue_p50_ms"] == 30
    assert (figures["cached_tokens"], figures["hit_rate"]) == (4, 0.2)
    assert (figures["requests"], figures["failed"]) == (2, 0)
    assert "goodput_share" not in figures
    assert "errors" not in figures


def test_failed_requests_count_as_failed_and_give_no_tokens() -> None:
    lines = [line("a", 0.0, 0.5, 1.0), line("b", 0.0, 0.1, error="http_503", finished=0.2), line("c", 0.0)]
    figures = summarise(lines, Slo(ttft_ms=1000))
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (3, 2, 2)
    assert figures["errors"] == {"http_503": 1}
    assert figures["goodput_share"] == pytest.approx(1 / 3, rel=1e-3)


def test_nothing_at_all_is_no_division_by_zero() -> None:
    figures = summarise([])
    assert figures["output_tokens_s"] is None
    assert figures["ttft_p50_ms"] is None


def test_goodput_needs_every_objective() -> None:
    fast, late, slow = line("a", 0, 0.1, 0.2), line("b", 0, 0.9, 1.0), line("c", 0, 0.1, 0.9)
    slo = Slo(ttft_ms=500, tpot_ms=500)
    assert [slo.met(item) for item in (fast, late, slow)] == [True, False, False]
    figures = summarise([fast, late, slow], slo)
    assert figures["goodput_share"] == pytest.approx(1 / 3, rel=1e-3)
    assert figures["goodput_requests_s"] == 1
    assert not Slo()
    assert Slo(e2e_ms=200).met(fast)
    assert not Slo(e2e_ms=199).met(fast)


def test_tenants_apart() -> None:
    lines = [line("a", 0, 1.0, tenant="x"), line("b", 0, 2.0, tenant="y"), line("c", 0, 3.0, tenant="y")]
    parted = by_tenant(lines)
    assert {name: figures["requests"] for name, figures in parted.items()} == {"x": 1, "y": 2}
    assert by_tenant(lines[:1]) == {}
