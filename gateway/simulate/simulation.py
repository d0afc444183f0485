"""The event loop of a simulated run: arrivals, ends of steps, waits that run out. Deterministic by seed.

Rules
- Of events at one moment, ends of steps come before arrivals, and workers in their order.
- Before anything is decided, every worker has reported the steps that are over by then (``SimulatedWorker.catch_up``).
  Nothing is decided about a request that joins a line while every room is closed: it waits, whoever is asked.
- ``observer(front, now)`` is called after every turn: tests look at what must hold at every instant.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.collection import without_collection
from gateway.simulate.clock import PS_PER_S, Clock
from gateway.simulate.front import Front
from gateway.simulate.ledger import Ledger
from gateway.simulate.scenario import Scenario
from gateway.simulate.scenario_file import LoadedScenario
from gateway.simulate.step_time import load as load_step_time
from gateway.simulate.worker import SimulatedWorker
from gateway.simulate.workload import Request, Workload, principal
from policies.spi import CacheScopePolicy, PolicyContext
from policies.types import CacheScope

IDLE_REPORT_S = 1.0
_SECRET = b"one secret for every simulated gateway, so that runs repeat"
Observer = Callable[[Front, float], None]


@dataclass(slots=True)
class Run:
    """What a run left."""

    scenario: Scenario
    ledger: Ledger
    elapsed_s: float
    """Simulated seconds."""
    wall_s: float
    requests: int
    preemptions: int
    steps: int
    busy_s: float
    """Seconds in steps, over all workers."""
    unfinished: int


class Simulation:
    """One scenario, once."""

    def __init__(self, loaded: LoadedScenario, *, coalesce: bool = True, observer: Observer | None = None) -> None:
        """Raises ConfigErrors, TrafficLogError, PolicyConfigError."""
        scenario = self._scenario = loaded.scenario
        config = scenario.workers
        self._observer = observer
        self._in_vain: float | None = None
        """An expiry that was due and came to nothing."""
        self._clock = Clock()
        scopes = _scopes(loaded) if config.prefix_cache or scenario.routing.use == "prefix_affinity" else ()
        self._workload = Workload(scenario, loaded.base_dir, scopes)
        self.front = Front(loaded, self._workload)
        step_time = load_step_time(config.step_ms, loaded.base_dir)
        self.workers = [
            SimulatedWorker(f"worker-{i}", config, step_time, self._clock, self.front.answer, coalesce=coalesce)
            for i in range(config.count)
        ]
        for worker in self.workers:
            self.front.join(worker.handle)

    def run(self) -> Run:
        """From the first second to the last. Raises NotSimulable."""
        began = time.perf_counter()
        scenario, front = self._scenario, self.front
        end = round(scenario.duration_s * PS_PER_S)
        requests = self._workload.requests()
        coming = next(requests, None)
        count = 0
        last = 0
        while True:
            due = min((worker.due for worker in self.workers if worker.due is not None), default=None)
            arrival = None if coming is None else round(coming.at * PS_PER_S)
            now, what = self._next(due, arrival)
            if now is None or (now > end and not scenario.drain):
                break
            last = now
            if what == "step":
                self._end_steps(now)
            elif what == "arrival":
                assert coming is not None
                looked = not front.waits_anyway(coming)
                if looked:
                    self._catch_up(now)
                seconds = self._clock.move(now)
                same = coming.at
                while coming is not None and coming.at == same:
                    front.arrive(coming, seconds)
                    count += 1
                    coming = next(requests, None)
                if looked:
                    self._turn(now)
            else:
                expiry = front.next_expiry()
                self._catch_up(now)
                self._turn(now)
                # It may be named too early: then something else has to happen before it is looked at again.
                self._in_vain = expiry if front.next_expiry() == expiry else None
        if not scenario.drain:
            last = end
            self._catch_up(end)
        self._clock.move(last)
        front.ledger.close(last / PS_PER_S)
        return Run(
            scenario,
            front.ledger,
            elapsed_s=last / PS_PER_S,
            wall_s=time.perf_counter() - began,
            requests=count,
            preemptions=sum(worker.planner.roster.preemptions for worker in self.workers),
            steps=sum(worker.steps for worker in self.workers),
            busy_s=sum(worker.busy_ps for worker in self.workers) / PS_PER_S,
            unfinished=len(front.queue) + front.queue.running,
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _next(self, due: int | None, arrival: int | None) -> tuple[int | None, str]:
        """The next moment at which something happens, and what."""
        expiry = self.front.next_expiry()
        wait = None if expiry is None or expiry == self._in_vain else self._clock.after(expiry)
        best, what = due, "step"
        if arrival is not None and (best is None or arrival < best):
            best, what = arrival, "arrival"
        if wait is not None and (best is None or wait < best):
            best, what = wait, "expiry"
        return best, what

    def _end_steps(self, now: int) -> None:
        """Every step that ends now; then one turn for all of them."""
        self._catch_up(now)
        for worker in self.workers:
            if worker.due == now:
                news = worker.end_step()
                self.front.report(worker.handle, news, self._clock.move(now))
        self._turn(now)

    def _catch_up(self, now: int) -> None:
        """Report what is over by ``now`` of every stretch under way."""
        for worker in self.workers:
            if worker.stretching:
                found = worker.catch_up(now)
                if found is not None:
                    news, at = found
                    self.front.report(worker.handle, news, self._clock.move(at))

    def _turn(self, now: int) -> None:
        front = self.front
        seconds = self._clock.move(now)
        for worker in self.workers:
            if worker.due is None and worker.handle.stale_s(seconds) > IDLE_REPORT_S:
                front.report(worker.handle, worker.idle_report(), seconds)
        sent = front.dispatched
        front.turn(seconds)
        if front.dispatched > sent:
            for worker in self.workers:
                worker.start(now)
        for worker in self.workers:
            if worker.stretching:
                worker.pause(front.rest(worker.handle))
        front.ledger.mark(seconds)
        if self._observer is not None:
            self._observer(front, seconds)


def simulate(loaded: LoadedScenario, *, coalesce: bool = True, observer: Observer | None = None) -> Run:
    """Run one scenario. Raises ConfigErrors, TrafficLogError, PolicyConfigError, NotSimulable."""
    with without_collection():
        return Simulation(loaded, coalesce=coalesce, observer=observer).run()


def _scopes(loaded: LoadedScenario) -> list[CacheScope]:
    context = PolicyContext(server_secret=_SECRET)
    policy: CacheScopePolicy = loaded.registry.build("cache_scope", "tenant", {}, context)
    return [policy.scope(principal(tenant), 0) for tenant in loaded.scenario.tenants]


__all__ = ["Observer", "Request", "Run", "Simulation", "simulate"]
