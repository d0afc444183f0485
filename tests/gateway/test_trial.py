"""Beginning and ending a shadow run: whatever comes in between, no candidate stays in a queue, and each closes once."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.settings import PolicyUse
from policies.scheduling.fcfs import FcfsScheduler
from policies.shadow import ShadowPolicy
from policies.spi import NoConfig, PolicySpec
from tests.gateway.conftest import Start


class Living(FcfsScheduler):
    """With a lifecycle."""

    def __init__(self, notes: list[str], *, starts: bool = True) -> None:
        super().__init__()
        self.notes, self.starts = notes, starts

    async def start(self) -> None:
        self.notes.append("start")
        if not self.starts:
            raise RuntimeError("cannot start")

    async def close(self) -> None:
        self.notes.append("close")


def specs(notes: list[str]) -> list[PolicySpec]:
    def make(starts: bool) -> Any:
        return lambda config, ctx: Living(notes, starts=starts)

    return [
        PolicySpec("scheduling", "living", NoConfig, make(True), "Starts."),
        PolicySpec("scheduling", "unstartable", NoConfig, make(False), "Does not."),
    ]


async def test_a_run_that_is_ended_at_once_leaves_nothing_behind(start: Start) -> None:
    """Its task has not had its first step by then."""
    notes: list[str] = []
    async with start(policies=specs(notes)) as site:
        runtime, guard = site.gateway.parts.runtime, site.dispatcher._desk.guard
        trial = await runtime.try_in_shadow(PolicyUse(use="living"), 60)
        assert isinstance(guard.policy, ShadowPolicy)
        await runtime.end_trial("enough")
        assert (trial.state, trial.reason) == ("cancelled", "enough")
        assert not isinstance(guard.policy, ShadowPolicy)
        assert notes == ["start", "close"]
        await runtime.end_trial("again")
        assert notes == ["start", "close"]


async def test_a_candidate_that_cannot_start_leaves_the_run_under_way_alone(start: Start) -> None:
    notes: list[str] = []
    async with start(policies=specs(notes)) as site:
        runtime, guard = site.gateway.parts.runtime, site.dispatcher._desk.guard
        trial = await runtime.try_in_shadow(PolicyUse(use="living"), 60)
        with pytest.raises(RuntimeError, match="cannot start"):
            await runtime.try_in_shadow(PolicyUse(use="unstartable"), 60)
        assert runtime.trial is trial
        assert trial.running
        assert isinstance(guard.policy, ShadowPolicy)
        assert notes == ["start", "start", "close"]
    assert notes == ["start", "start", "close", "close"]
