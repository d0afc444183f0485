"""Parallel sampling: what choices of one prompt share in memory, counted while they run."""

from __future__ import annotations

import pytest

from tests.workers.engine.drive import Drive, request
from workers.protocol import SamplingParams


@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize("prompt", [32, 35], ids=["whole blocks", "partial tail"])
def test_choices_share_the_prompt_and_nothing_else(n: int, prompt: int) -> None:
    """After the fork every full prompt block has n users; a partial tail is copied by all but its last user."""
    drive = Drive(blocks=200, block_size=4, max_running=16, prefix_cache=False)
    drive.add(request("many", prompt, 9, n=n, params=SamplingParams(seed=3, ignore_eos=True)))
    drive.step()
    pool, full = drive.planner.pool, prompt // 4
    shared = full + (prompt % 4 > 0)
    assert (pool.used, pool.spared) == (shared, (n - 1) * shared)  # forked, nothing written yet
    plan = drive.step()
    assert plan is not None
    assert len(plan.copies) == (n - 1 if prompt % 4 else 0)
    assert (pool.used, pool.spared) == (full + n, (n - 1) * full)
    while drive.step() is not None:
        assert pool.spared == (n - 1) * full or pool.used == 0
    drive.idle()


def test_what_is_saved_against_requests_of_their_own() -> None:
    """1,000 tokens in, 128 out: most blocks in use, and the part that sharing saves, for 2, 4 and 6 choices."""
    saved = {}
    for n in (2, 4, 6):
        peaks = []
        for requests in (
            [request("many", 1000, 128, n=n)],
            [request(f"single {index}", 1000, 128) for index in range(n)],
        ):
            drive = Drive(
                blocks=500, block_size=16, max_running=16, max_step_tokens=8192, max_context=2000, prefix_cache=False
            )
            drive.add(*requests)
            peak = 0
            while drive.step() is not None:
                peak = max(peak, drive.planner.pool.used)
            peaks.append(peak)
        saved[n] = round(1 - peaks[0] / peaks[1], 3)
    assert saved == {2: 0.437, 4: 0.655, 6: 0.728}
