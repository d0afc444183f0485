"""Strikes, fingerprints, the retry budget."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.retry import MAX_STRIKES, RetryBudget, Strikes, fingerprint
from workers.protocol import Generate, SamplingParams


def test_a_fingerprint_is_the_request_not_its_id() -> None:
    """security 59: sending it again under a new id does not start from zero; any other request does."""
    base = Generate(id="a", tokens=[1, 2, 3], max_tokens=5)
    same = fingerprint("t", "m", base)
    assert fingerprint("t", "m", replace(base, id="b", trace={"traceparent": "x"}, scope=b"s")) == same
    others = [
        fingerprint("u", "m", base),
        fingerprint("t", "n", base),
        fingerprint("t", "m", replace(base, tokens=[1, 2])),
        fingerprint("t", "m", replace(base, tokens=[12, 3])),
        fingerprint("t", "m", replace(base, max_tokens=6)),
        fingerprint("t", "m", replace(base, n=2)),
        fingerprint("t", "m", replace(base, params=SamplingParams(temperature=0.5))),
    ]
    assert len({same, *others}) == len(others) + 1


def test_strikes_add_up_fade_and_are_bounded() -> None:
    strikes = Strikes(capacity=2, ttl_s=10)
    assert strikes.count(b"a", 0.0) == 0
    assert strikes.strike(b"a", 0.0, produced=7) == 1
    assert strikes.strike(b"a", 5.0, produced=9) == MAX_STRIKES
    assert strikes.produced(b"a") == 9
    assert strikes.count(b"a", 14.0) == 2
    assert strikes.count(b"a", 15.1) == 0, "ten seconds after the last one"
    for key in (b"b", b"c", b"d"):
        strikes.strike(key, 20.0)
    assert len(strikes) == 2
    assert strikes.count(b"b", 20.0) == 0
    strikes.clear(b"d")
    assert strikes.count(b"d", 20.0) == 0


def test_retries_are_a_part_of_the_dispatches() -> None:
    """security 77: where everything fails, retries end."""
    budget = RetryBudget(capacity=3, ratio=0.2)
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]
    for _ in range(5):
        budget.earn()
    assert [budget.spend() for _ in range(2)] == [True, False]
