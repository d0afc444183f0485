"""Restore or recompute: decided by what both cost so far."""

from __future__ import annotations

from workers.engine.tier_rates import DISK, HOST, Rates


def test_what_is_not_known_yet_is_tried() -> None:
    rates = Rates(16)
    assert rates.pays(HOST, 10)
    rates.moved(HOST, 1, 1e12)
    assert rates.pays(HOST, 10)
    rates.computed(100, 1e6)
    assert not rates.pays(HOST, 10)


def test_the_cheaper_one_is_taken() -> None:
    rates = Rates(16)
    rates.computed(100, 100 * 1000)  # 16 µs a block
    rates.moved(HOST, 10, 10 * 10_000)
    assert rates.pays(HOST, 50)
    assert not rates.pays(HOST, 50, tokens=100), "fewer tokens are cheaper to compute"
    rates.moved(DISK, 1, 5_000)
    assert rates.pays(DISK, 4)
    assert not rates.pays(DISK, 4, queued=4), "others are read before"
    rates.moved(DISK, 1, 1e9)
    assert not rates.pays(DISK, 4)


def test_one_slow_reading_is_not_believed_for_ever() -> None:
    rates = Rates(16)
    rates.computed(100, 100 * 1000)
    rates.moved(DISK, 1, 200_000)
    asked = 1
    while not rates.pays(DISK, 1):
        asked += 1
    assert 10 < asked < 1000


def test_short_steps_say_nothing_of_prompts() -> None:
    rates = Rates(16)
    rates.computed(3, 1e9)
    assert rates.token_ns == 0
    assert rates.recompute_ns(4) == 0
    rates.computed(64, 64_000)
    assert rates.recompute_ns(2) == 32_000
