"""Credits: a waiting group gets its part, idling earns nothing, an idle machine is used without paying later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling._floors import Floors


def floors(**shares: float) -> Floors[str]:
    made: Floors[str] = Floors()
    for group, share in shares.items():
        made.grant(group, share)
    return made


def test_it_is_due_while_it_is_behind() -> None:
    made = floors(low=0.25)
    made.wait("low", True)
    assert made.due() == []
    made.serve("high", 100.0, ordinary=True)
    assert made.due() == ["low"]
    made.serve("low", 20.0)
    assert made.due() == ["low"], "20 of 120 is less than a quarter"
    made.serve("low", 40.0)
    assert made.due() == []


def test_idling_earns_nothing_and_debts_stay() -> None:
    made = floors(low=0.5, other=0.1)
    made.serve("high", 1000.0)
    made.wait("low", True)
    assert made.due() == []
    made.serve("high", 10.0)
    made.wait("low", False)
    assert made.due() == []
    made.wait("low", True)
    assert made.due() == [], "credit left over is dropped"
    made.serve("low", 100.0)
    made.wait("low", False)
    made.wait("low", True)
    made.serve("high", 90.0)
    assert made.due() == [], "50 behind its debt of 50, less 45 earned"
    made.serve("high", 20.0)
    assert made.due() == ["low"]


def test_ordinary_turns_leave_one_job_of_debt() -> None:
    made = floors(low=0.1)
    made.wait("low", True)
    for _ in range(100):
        made.serve("low", 50.0, ordinary=True)
    made.serve("high", 510.0)
    assert made.due() == ["low"]


def test_credits_move_on() -> None:
    old, new = floors(low=0.5, gone=0.1), floors(low=0.5)
    for made in (old, new):
        made.wait("low", True)
    old.serve("high", 100.0)
    new.load({**old.dump(), "low ": 1.0, "high": "x"}, {"low": "low"})
    assert new.due() == ["low"]
    assert new.share("low") == 0.5
    assert new.share("high") == 0.0


COST = st.integers(1, 100)


@given(
    st.lists(st.tuples(COST, COST, COST, st.booleans()), min_size=1, max_size=200),
    st.sampled_from([0.1, 0.3, 0.5]),
    st.sampled_from([0.05, 0.4]),
)
def test_who_waits_gets_its_part(costs: list[tuple[int, int, int, bool]], low: float, mid: float) -> None:
    """At least share · total − one job, at every moment, whatever the costs; ``mid`` comes and goes."""
    made = floors(low=low, mid=mid)
    made.wait("low", True)
    total = got = 0.0
    for high_cost, low_cost, mid_cost, mid_waits in costs:
        made.wait("mid", mid_waits)
        due = made.due()
        group = due[0] if due else "high"
        cost = {"high": high_cost, "low": low_cost, "mid": mid_cost}[group]
        made.serve(group, cost, ordinary=not due)
        total += cost
        got += cost if group == "low" else 0
        assert got >= low * total - 2 * 100


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_floor_is_a_part(share: float) -> None:
    from policies.scheduling.edf import check_floors

    with pytest.raises(ValueError, match="floor of 'low' must be above 0 and at most 1"):
        check_floors({"low": share})
    with pytest.raises(ValueError, match=r"floors add up to 1\.2"):
        check_floors({"low": 0.6, "high": 0.6})
