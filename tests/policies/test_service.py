"""The book of service: who was served since when, shares, rate; bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import service
from policies.service import ServiceBook
from policies.types import TenantId

EVENTS = st.lists(st.one_of(st.none(), st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 9))), max_size=120)


@given(EVENTS)
def test_since_equals_a_plain_sum(events: list[tuple[str, int] | None]) -> None:
    book = ServiceBook()
    moments: list[tuple[int, dict[str, int]]] = []
    total: dict[str, int] = {}
    for event in events:
        if event is None:
            moments.append((book.mark(), dict(total)))
        else:
            tenant, tokens = event
            book.serve(TenantId(tenant), 1.0, tokens, 0.0, False)
            total[tenant] = total.get(tenant, 0) + tokens
    for epoch, before in moments:
        expected = {name: tokens - before.get(name, 0) for name, tokens in total.items()}
        expected = {name: tokens for name, tokens in expected.items() if tokens}
        assert dict(book.since(epoch, 100)) == expected
        top = book.since(epoch, 3)
        assert [tokens for _, tokens in top] == sorted(expected.values(), reverse=True)[:3]


def test_the_rate_is_that_of_busy_time_and_survives_a_quiet_night() -> None:
    book = ServiceBook()
    assert book.rate is None
    for second in range(30):
        book.advance(float(second), True)
        book.serve(TenantId("a"), 1.0, 50, float(second), True)
    assert book.rate == pytest.approx(50.0, rel=0.1)
    before = book.rate
    book.advance(30_000.0, False)
    assert book.rate == before
    for second in range(60):
        book.advance(30_001.0 + second, True)
        book.serve(TenantId("a"), 1.0, 200, 30_001.0 + second, True)
    assert book.rate == pytest.approx(200.0, rel=0.1)


def test_light_load_is_no_measurement() -> None:
    """gateway B7: a rate measured while nobody waited would make admission refuse the first burst."""
    book = ServiceBook()
    for second in range(100):
        book.advance(float(second), False)
        book.serve(TenantId("a"), 1.0, 1, float(second), False)
    assert book.rate is None


def test_memory_is_bounded_by_tenants_and_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_TENANTS", 10)
    monkeypatch.setattr(service, "MAX_MARKS", 16)
    book = ServiceBook()
    epochs = []
    for step in range(2000):
        epochs.append(book.mark())
        book.serve(TenantId("steady"), 1.0, 1, float(step), True)
        book.serve(TenantId(f"t{step % 50}"), 1.0, 1, float(step), True)
    assert len(book.totals()) <= 11
    served = dict(book.since(epochs[-5], 20))
    assert served["steady"] == 5, "recent moments stay exact"
    long_ago = dict(book.since(epochs[1000], 20))["steady"]
    assert 1 <= long_ago <= 1000, "old ones get coarser, never larger than the truth"


def test_what_jobs_used_of_what_they_might_have_used() -> None:
    book = ServiceBook()
    for _ in range(service.MIN_USED_JOBS - 1):
        book.ended(100, 25)
    assert book.used_ratio is None
    book.ended(100, 25)
    assert book.used_ratio == pytest.approx(0.25)
    for _ in range(10 * service.USED_JOBS):
        book.ended(1000, 1000)
    assert book.used_ratio == pytest.approx(1.0)
    book.ended(10, 4000)  # a job that was run twice
    assert book.used_ratio == 1.0


def test_with_many_tenants_it_looks_at_few_and_still_names_the_heavy_ones() -> None:
    """A dispatch must not cost a look at a thousand tenants; figures stay exact."""
    book = ServiceBook()
    truth: dict[str, int] = {}

    def serve(tenant: str, tokens: int, now: float) -> None:
        book.serve(TenantId(tenant), 1.0, tokens, now, True)
        truth[tenant] = truth.get(tenant, 0) + tokens

    for i in range(1000):
        serve(f"t{i}", 5, 0.0)
    epoch = book.mark()
    before = dict(truth)
    for i in range(3000):
        now = i / 100
        serve(f"t{i % 1000}", 5, now)
        if i < 2500 and i % 10 == 0:
            serve(f"heavy{i % 30}", 300, now)  # three of them, and not among the last
        book.mark()
    top = book.since(epoch, 5)
    assert {tenant for tenant, _ in top[:3]} == {"heavy0", "heavy10", "heavy20"}
    assert all(tokens == truth[tenant] - before.get(tenant, 0) for tenant, tokens in top)
    assert len(top) == 5


def test_cost_of_a_look_does_not_grow_with_the_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    real = service.bisect_left

    def counting(*args: object) -> int:
        nonlocal looked
        looked += 1
        return real(*args)  # type: ignore[call-overload,no-any-return]

    book = ServiceBook()
    epoch = book.mark()
    for i in range(2000):
        book.serve(TenantId(f"t{i}"), 1.0, 5, 0.0, True)
    monkeypatch.setattr(service, "bisect_left", counting)
    assert len(book.since(epoch, 5)) == 5
    assert looked <= service.MAX_LOOKED_AT + service.HEAVY
