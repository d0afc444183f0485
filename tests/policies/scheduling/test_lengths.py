"""Predicted output: what is learnt, from what, and how much is kept."""

from __future__ import annotations

from typing import Any

import pytest

from policies.scheduling import _lengths as module
from policies.scheduling._lengths import Lengths
from policies.testing import make_job


def ran(lengths: Lengths, output: int, tenant: str = "a", pieces: int = 3) -> None:
    job = make_job(f"{tenant}{output}", tenant, output=500)
    lengths.begin(job)
    for _ in range(pieces):
        lengths.note(job, output // pieces, False)
    lengths.note(job, output - pieces * (output // pieces), True)


def test_before_anything_was_learnt_it_is_the_most() -> None:
    assert Lengths("mean").expect(make_job("x", output=70)) == 70
    assert Lengths("quantile").expect(make_job("x", output=70)) == 70
    assert Lengths("max").expect(make_job("x", output=70)) == 70
    assert Lengths("none").expect(make_job("x", output=70)) == 0


def test_mean_and_quantile_follow_the_tenant_and_model() -> None:
    mean, quantile = Lengths("mean"), Lengths("quantile", 0.8)
    for lengths in (mean, quantile):
        for output in range(10, 210, 10):
            ran(lengths, output)
        ran(lengths, 7, "b")
    job = make_job("next", output=500)
    assert 150 < mean.expect(job) < 180, "the latest count most"
    assert quantile.expect(job) == 170
    assert mean.expect(make_job("next", "b", output=500)) == 7
    assert mean.expect(make_job("next", "c", output=500)) == 500
    assert mean.expect(make_job("small", output=20)) == 20, "never above what it may produce"


def test_old_lengths_are_forgotten() -> None:
    lengths = Lengths("quantile", 0.99)
    ran(lengths, 400)
    for _ in range(module.WINDOW):
        ran(lengths, 30)
    assert lengths.expect(make_job("next", output=500)) == 30


def test_jobs_that_were_not_begun_here_teach_nothing() -> None:
    lengths = Lengths("mean")
    lengths.note(make_job("foreign", output=500), 3, True)
    assert lengths.expect(make_job("next", output=500)) == 500
    lengths.begin(make_job("gone"))
    lengths.forget(make_job("gone").id)
    lengths.note(make_job("gone"), 3, True)
    assert lengths.expect(make_job("next", output=500)) == 500


def test_what_was_learnt_moves_on() -> None:
    old, new = Lengths("quantile", 0.5), Lengths("quantile", 0.5)
    for output in (10, 20, 30):
        ran(old, output)
    new.load({"lengths": old.dump()})
    assert new.expect(make_job("next", output=500)) == old.expect(make_job("next", output=500)) == 20
    new.load({})
    assert new.expect(make_job("next", output=500)) == 500


@pytest.mark.parametrize("rows", ["x", [["a", "m"]], [["a", "m", ["long"]]], [["a", "m", [-1]]], [[1, "m", [1]]]])
def test_load_refuses_what_is_not_its_dump(rows: Any) -> None:
    with pytest.raises(ValueError, match="'lengths' must be a list of"):
        Lengths("mean").load({"lengths": rows})


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SERIES", 10)
    lengths = Lengths("mean")
    for i in range(100):
        ran(lengths, 5, f"t{i}")
        ran(lengths, 9, "steady")
    assert len(lengths.dump()) == 10
    assert lengths.expect(make_job("next", "steady", output=500)) == 9
