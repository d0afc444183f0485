"""Billing by differences of cumulative counters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.metering import Meter
from policies.types import Charge, Usage


def test_a_repeated_or_late_message_bills_nothing() -> None:
    meter = Meter(100, 1)
    assert meter.observe(0, 60, 40, 1) == Charge(60, 40, 1)
    assert meter.observe(0, 60, 40, 1) == Charge()
    assert meter.observe(0, 60, 40, 5) == Charge(0, 0, 4)
    assert meter.observe(0, 30, 40, 2) == Charge()
    assert meter.usage == Usage(60, 40, 5)


def test_choices_share_their_prompt() -> None:
    meter = Meter(10, 3)
    charges = [meter.observe(index, 10 if index == 0 else 0, 0, 7) for index in range(3)]
    assert sum(charges, Charge()) == meter.usage == Usage(10, 0, 21)
    assert meter.observe(3, 10, 0, 9) == Charge(), "no such choice"


def test_a_second_attempt_bills_only_what_the_first_had_not_reached() -> None:
    """security 77: recompute is nobody's bill, computed or cached."""
    meter = Meter(100, 1)
    meter.observe(0, 70, 0, 0)
    assert meter.observe(0, 36, 64, 3) == Charge(0, 30, 3)
    assert meter.usage == Usage(70, 30, 3)
    assert meter.observe(0, 100, 0, 2) == Charge()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 20)), max_size=20))
def test_the_bill_only_grows_and_never_exceeds_the_prompt(reports: list[tuple[int, int, int]]) -> None:
    meter = Meter(50, 1)
    total = Usage()
    for computed, cached, output in reports:
        charge = meter.observe(0, computed, cached, output)
        assert min(charge.prompt, charge.cached, charge.output) >= 0
        total += charge
    assert total == meter.usage
    assert total.prompt + total.cached <= 50
    assert total.output == max((output for _, _, output in reports), default=0)
