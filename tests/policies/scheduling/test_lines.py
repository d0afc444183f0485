"""Per-tenant lines and the ranking with lazy updates, against plain models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling._lines import Lines, Ranking
from policies.testing import make_job
from policies.types import JobId, TenantId


def test_lines_keep_order_and_returned_jobs_go_first() -> None:
    lines = Lines()
    assert lines.push(make_job("a1"))
    assert not lines.push(make_job("a2"))
    assert lines.push(make_job("b1", "b"))
    assert lines.push_front(make_job("a0"))
    assert lines.head(TenantId("a")).id == "a0"
    assert lines.head_order(TenantId("a")) < 0 < lines.head_order(TenantId("b"))
    with pytest.raises(ValueError, match="'a1' is already queued"):
        lines.push_front(make_job("a1"))
    assert lines.discard(JobId("a1")) is not None
    assert lines.discard(JobId("a1")) is None
    assert [job.id for job in lines.drain()] == ["a0", "a2", "b1"]
    assert len(lines) == 0
    assert not lines.has(TenantId("a"))


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["set", "remove", "first", "min"]), st.sampled_from("abcdef"), st.integers(-20, 20)),
    max_size=150,
)


@given(OPERATIONS)
def test_ranking_equals_a_sorted_dictionary(operations: list[tuple[str, str, int]]) -> None:
    ranking: Ranking[str] = Ranking()
    model: dict[str, int] = {}
    for action, key, rank in operations:
        if action == "set":
            ranking.set(key, rank)
            model[key] = rank
        elif action == "remove" and key in model:
            ranking.remove(key)
            del model[key]
        elif action == "first":
            asked: list[str] = []

            def accept(candidate: str, wanted: str = key, asked: list[str] = asked) -> bool:
                asked.append(candidate)
                return candidate >= wanted

            found = ranking.first(accept)
            fitting = [name for name in model if name >= key]
            assert (found is None) == (not fitting)
            if found is not None:
                assert model[found] == min(model[name] for name in fitting)
            assert len(asked) == len(set(asked))
            assert [model[name] for name in asked] == sorted(model[name] for name in asked)
        elif action == "min" and model:
            assert ranking.min() == min(model.values())
        assert len(ranking) == len(model)


def test_ranking_sweeps_stale_entries() -> None:
    ranking: Ranking[str] = Ranking()
    ranking.set("other", 0)
    for rank in range(10_000, 0, -1):
        ranking.set("key", rank)
    assert len(ranking._heap) < 200
    assert ranking.first(lambda key: key == "key") == "key"


def test_ranking_keeps_its_order_after_many_were_refused() -> None:
    ranking: Ranking[int] = Ranking()
    for key in range(500):
        ranking.set(key, (key * 7919) % 500)
    assert ranking.first(lambda key: False) is None
    order = []
    while (key := ranking.first(lambda key: True)) is not None:
        order.append((key * 7919) % 500)
        ranking.remove(key)
    assert order == list(range(500))
