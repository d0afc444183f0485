"""Issue 4, work conservation: what stood free at the worker while jobs waited, from the worker's own records.

The gate is not asked anything. At each turn: the queue, what the worker was sent and has not ended, and from the
engine's planner how much of each prompt is computed. A job is admissible when a slot is free, the next step has budget
left, and its whole prompt and answer fit beside the whole prompts and answers of all that is there: then nothing that
may happen later is a reason to let it wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.simulate.front import Front
from gateway.simulate.simulation import Simulation
from policies.types import Job
from tests.gateway.simulate.scenarios import shipped

POLICIES = ["vtc", "fcfs", "wfq", "drr", "hierarchical"]


class Watch:
    """Seconds in which jobs waited, and those of them in which one was admissible or the worker stood still."""

    def __init__(self, policy: str, workers: dict[str, Any]) -> None:
        loaded = shipped("work-conservation", policy, 1)
        scenario = loaded.scenario
        config = self.workers = scenario.workers.model_copy(update=workers)
        self.simulation = Simulation(
            replace(loaded, scenario=scenario.model_copy(update={"duration_s": 60, "workers": config})),
            observer=self._look,
        )
        self.waited = self.left_free = self.stood_still = 0.0
        self.most = 0
        """Most requests at the worker at once."""
        self._since: tuple[float, bool, bool] | None = None
        self.run = self.simulation.run()

    def _look(self, front: Front, now: float) -> None:
        if self._since is not None:
            began, free, still = self._since
            self.waited += now - began
            self.left_free += free * (now - began)
            self.stood_still += still * (now - began)
        jobs = front.queue.queued_jobs()
        self._since = (now, self._admissible(front, jobs), self.simulation.workers[0].due is None) if jobs else None

    def _admissible(self, front: Front, jobs: list[Job]) -> bool:
        (worker,) = self.simulation.workers
        there = [flight.job for flight in front._flights.values()]
        self.most = max(self.most, len(there))
        sequences = [sequence for group in worker.planner.roster.requests.values() for sequence in group]
        unread = sum(max(0, sequence.prompt_len - sequence.computed) for sequence in sequences)
        unread += sum(len(message.tokens) for message in worker._mail)
        answering = sum(sequence.computed >= sequence.prompt_len for sequence in sequences)
        if len(there) >= self.workers.max_running or unread + answering >= self.workers.max_step_tokens:
            return False
        room = self.workers.blocks - sum(map(self._blocks, there))
        return any(self._blocks(job) <= room for job in jobs)

    def _blocks(self, job: Job) -> int:
        return -(-job.total_tokens // self.workers.block_size)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_slot_is_free_while_a_job_waits(policy: str) -> None:
    """16 slots and a cache that holds what runs in them."""
    watch = Watch(policy, {"max_running": 16, "kv_tokens": 16_384})
    assert watch.waited > 40
    assert watch.most == 17, "one is on its way, for the slot that comes free next"
    assert watch.left_free == 0
    assert watch.stood_still == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_that_fills_up_is_filled_but_for_the_even_spacing(policy: str) -> None:
    """The scenario as shipped, where the cache binds: ``gateway/pace.py`` holds a job back for a few steps at times."""
    watch = Watch(policy, {})
    assert watch.waited > 40
    assert watch.most > 19, "more than fit with their whole answers"
    assert watch.left_free <= 0.03 * watch.waited
    assert watch.stood_still == 0


def test_a_gate_that_keeps_a_slot_empty_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.gate import Room

    real = Room.of

    def stingy(view: Any, *arguments: Any, **more: Any) -> Room:
        return real(replace(view, max_running=view.max_running - 2), *arguments, **more)

    monkeypatch.setattr(Room, "of", stingy)
    watch = Watch("fcfs", {"max_running": 16, "kv_tokens": 16_384})
    assert watch.left_free > 0.5 * watch.waited
