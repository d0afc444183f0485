"""``max_running: auto``: what the cache holds of requests as they have been, and nobody loses a slot by it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.workers.engine.drive import Drive, request
from workers.config import MEAN_REQUEST_TOKENS, EngineConfig
from workers.engine.slots import REMEMBERED, Slots


def slots(blocks: int = 1000, **config: object) -> Slots:
    return Slots(EngineConfig.model_validate({"block_size": 16, "max_running": "auto", **config}), blocks)


def test_a_number_stays_what_it_is() -> None:
    made = slots(max_running=7)
    for _ in range(500):
        made.ended(10_000)
    assert made.limit == 7


def test_before_any_request_it_reckons_with_the_typical_one() -> None:
    assert slots().limit == 1000 * 16 // MEAN_REQUEST_TOKENS


def test_it_follows_the_last_requests_in_whole_blocks() -> None:
    made = slots()
    for _ in range(REMEMBERED):
        made.ended(65)  # 5 blocks
    assert made.limit == 200
    for _ in range(REMEMBERED // 2):
        made.ended(240)
    assert made.limit == 100
    for _ in range(REMEMBERED // 2):
        made.ended(240)
    assert made.limit == 66


def test_bounds() -> None:
    made = slots(max_step_tokens=64)
    for _ in range(REMEMBERED):
        made.ended(1)
    assert made.limit == 64
    for _ in range(REMEMBERED):
        made.ended(1_000_000)
    assert made.limit == 1


@pytest.mark.parametrize("wrong", [0, -1, "many", 1.5])
def test_other_values_are_refused(wrong: object) -> None:
    with pytest.raises(ValidationError, match="max_running"):
        EngineConfig.model_validate({"max_running": wrong})


def test_short_requests_let_more_run_and_a_lower_limit_takes_nobody_out() -> None:
    """Under the real planner: 40 short requests raise the limit, long ones lower it below what runs."""
    drive = Drive(blocks=64, block_size=4, max_running="auto", max_step_tokens=64)
    assert drive.planner.stats().max_running == 1  # 256 tokens of cache, 512 to a request
    drive.add(*(request(f"s{index}", 4, 4) for index in range(300)))
    running = []
    while drive.step():
        stats = drive.planner.stats()
        running.append(stats.running)
        assert stats.running <= max(stats.max_running, running[-2] if len(running) > 1 else 1)
    assert running[0] <= 1
    assert max(running) > 8
    assert drive.planner.stats().max_running == 64 // 2
    drive.idle()


def test_choices_whose_slots_went_meanwhile_run_later() -> None:
    """Long requests lower the limit while a request's choices still ride on its prompt."""
    drive = Drive(blocks=128, block_size=4, max_running="auto", max_step_tokens=12)
    for _ in range(REMEMBERED):
        drive.planner.roster.slots.ended(4)
    drive.add(request("n", 48, 8, n=4))
    drive.step()
    for _ in range(REMEMBERED):
        drive.planner.roster.slots.ended(4 * 128)
    assert drive.planner.stats().max_running == 1
    drive.run()
    assert len(drive.last) == 4


def test_cancelled_requests_do_not_count() -> None:
    drive = Drive(blocks=64, block_size=4, max_running="auto", max_step_tokens=64)
    before = drive.planner.stats().max_running, drive.planner.roster.slots._sum
    drive.add(request("a", 8, 50))
    drive.step()
    drive.take(drive.planner.cancel("a"))
    assert (drive.planner.stats().max_running, drive.planner.roster.slots._sum) == before
