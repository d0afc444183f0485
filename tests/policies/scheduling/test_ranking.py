"""The ranking with lazy updates, against a plain model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling import _ranking
from policies.scheduling._ranking import Ranking

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["set", "remove", "first", "min"]), st.integers(0, 60), st.integers(-20, 20)),
    max_size=150,
)


@pytest.fixture(autouse=True, scope="module")
def few() -> Iterator[None]:
    """More than 10 are not kept sorted, and all are sorted when 4 were refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ranking, "_SORTED", 10)
        patch.setattr(_ranking, "_FEW", 4)
        yield


@given(st.sampled_from([0, 5, 31, 32, 33, 60]), OPERATIONS)
def test_ranking_equals_a_sorted_dictionary(begin: int, operations: list[tuple[str, int, int]]) -> None:
    """``begin`` with so many."""
    ranking: Ranking[int] = Ranking()
    model: dict[int, int] = {}
    for key in range(begin):
        ranking.set(key, key * 7919 % 41)
        model[key] = key * 7919 % 41
    for action, key, rank in operations:
        if action == "set":
            ranking.set(key, rank)
            model[key] = rank
        elif action == "remove" and key in model:
            ranking.remove(key)
            del model[key]
        elif action == "first":
            asked: list[int] = []

            def accept(candidate: int, wanted: int = key, asked: list[int] = asked) -> bool:
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
    order = []
    while (top := ranking.top()) is not None:
        order.append(model.pop(top))
        ranking.remove(top)
    assert not model
    assert order == sorted(order)


def test_ranking_keeps_nothing_of_earlier_ranks() -> None:
    ranking: Ranking[str] = Ranking()
    ranking.set("other", 0)
    for rank in range(10_000, 0, -1):
        ranking.set("key", rank)
    assert len(ranking._places._heap) <= 2 * 2 + 4
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
