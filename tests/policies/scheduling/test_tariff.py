"""Prepaid prompts: whatever is estimated and however it is reported, the sum is the tariff of what ran."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.manager import make_manager
from policies.registry import Registry
from policies.scheduling._tariff import Prepaid, Tariff
from policies.spi import PolicyConfigError
from policies.testing import make_job
from policies.types import Charge, JobId

CHARGES = st.lists(
    st.builds(Charge, st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8
)
COST = st.sampled_from([0.0, 0.5, 1.0, 2.0])


@given(st.integers(1, 100), CHARGES, COST, COST, COST, st.none() | st.integers(0, 120))
def test_sum_of_charges_is_the_tariff_of_what_ran(
    prompt: int,
    charges: list[Charge],
    input_cost: float,
    output_cost: float,
    cached_cost: float,
    predicted: int | None,
) -> None:
    tariff = Tariff(input_cost, output_cost, cached_cost)
    prepaid = Prepaid(tariff)
    job = make_job("x", prompt=prompt)
    cost = 0.0
    if predicted is not None:
        cost = prepaid.take(job, predicted, predicted % (prompt + 1))
        cost += prepaid.take(job, predicted)
    for index, charge in enumerate(charges):
        cost += prepaid.settle(job, charge, index == len(charges) - 1)
    total = sum(charges, Charge())
    assert cost == pytest.approx(tariff.cost(total))
    assert len(prepaid) == 0
    assert prepaid.dump() == {"prepaid": {}, "prepaid_output": {}}


def test_cancelled_before_it_ran_costs_nothing() -> None:
    prepaid = Prepaid(Tariff(1.0, 2.0, 0.0))
    assert prepaid.take(make_job("x", prompt=70)) == 70.0
    assert prepaid.settle(make_job("x", prompt=70), Charge(), True) == -70.0
    assert prepaid.take(make_job("y", prompt=30)) == 30.0
    assert prepaid.refund(JobId("y")) == 30.0
    assert prepaid.refund(JobId("y")) == 0.0


def test_load_refuses_what_is_not_its_dump() -> None:
    with pytest.raises(ValueError, match="prepaid"):
        Prepaid(Tariff(1.0, 2.0, 0.0)).load({"prepaid": {"x": "many"}})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "free"])
def test_costs_are_finite_and_not_negative(value: Any) -> None:
    """security 45: NaN passes "x < 0" checks."""
    with pytest.raises(PolicyConfigError) as caught:
        Registry.from_manager(make_manager()).validate("scheduling", "vtc", {"output_cost": value})
    assert [path for path, _ in caught.value.mistakes] == ["with.output_cost"]
