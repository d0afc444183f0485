"""A worker that fails everybody is left alone but for one probe per interval; callers' own mistakes never count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.breaker import Breaker


def opened(threshold: int = 3) -> Breaker:
    breaker = Breaker(threshold=threshold, interval_s=1.0, max_interval_s=5.0)
    for number in range(threshold):
        assert breaker.allows(0.0)
        breaker.fault(f"r{number}", 0.0)
    return breaker


def test_gateway_e5_after_enough_faults_one_probe_per_interval_goes_there() -> None:
    """gateway E5: failing worker picked again on each request."""
    breaker = opened()
    probes = []
    now = 0.0
    for number in range(400):
        now = number * 0.05
        if breaker.allows(now):
            probes.append(now)
            breaker.sent(f"p{number}", now)
            assert not breaker.allows(now), "one at a time"
            breaker.fault(f"p{number}", now)
    gaps = [later - earlier for earlier, later in zip([0.0, *probes], probes, strict=False)]
    assert all(gap >= 0.99 for gap in gaps)
    assert gaps == sorted(gaps[:3]) + gaps[3:]
    assert max(gaps) <= 5.1


def test_a_success_closes_it_and_forgets() -> None:
    breaker = opened()
    breaker.sent("p", 2.0)
    breaker.success()
    assert not breaker.is_open
    assert breaker.faults == 0
    breaker.fault("x", 3.0)
    assert breaker.allows(3.0)


def test_a_probe_that_says_nothing_frees_the_way_for_the_next() -> None:
    breaker = opened()
    breaker.sent("p", 1.5)
    assert not breaker.allows(9.0)
    breaker.neutral("other")
    assert not breaker.allows(9.0)
    breaker.neutral("p")
    assert breaker.allows(9.0)


def test_faults_of_requests_sent_before_it_opened_do_not_stretch_the_interval() -> None:
    breaker = opened()
    for number in range(20):
        breaker.fault(f"old{number}", 0.5)
    assert breaker.allows(1.0)


@given(st.lists(st.sampled_from(["neutral", "success", "fault"]), max_size=60))
def test_it_opens_only_after_faults_in_a_row(events: list[str]) -> None:
    breaker = Breaker(threshold=4)
    row = 0
    for number, event in enumerate(events):
        if event == "success":
            breaker.success()
            row = 0
        elif event == "fault":
            breaker.fault(f"r{number}", 0.0)
            row += 1
        else:
            breaker.neutral(f"r{number}")
        assert breaker.is_open == (row >= 4)
