"""A worker in miniature under a virtual clock: the queue core, one scheduling policy, D slots, steps.

Per step every running job computes up to ``chunk`` prompt tokens or, when its prompt is done, produces one output
token; both are charged as they happen, as the gateway does. Service is the tariff's cost of what ran.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from policies.manager import make_manager
from policies.queue import JobQueue
from policies.registry import Registry
from policies.scheduling._tariff import Tariff
from policies.spi import PolicyContext
from policies.testing import always
from policies.types import Charge, Job, JobId, PrefixKey

TARIFF = Tariff(1.0, 2.0, 0.0)
REGISTRY = Registry.from_manager(make_manager())


def build(name: str, **config: Any) -> Any:
    """A policy of the registry."""
    return REGISTRY.build("scheduling", name, config, PolicyContext())


class Cache:
    """A worker's prefix cache: the last ``size`` keys touched."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: OrderedDict[PrefixKey, None] = OrderedDict()

    def use(self, job: Job) -> int:
        """Cached tokens of the job's prompt; afterwards all of it is cached."""
        depth = 0
        while depth < len(job.prefix_keys) and job.prefix_keys[depth] in self._keys:
            depth += 1
        for key in reversed(job.prefix_keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._size:
            self._keys.popitem(last=False)
        return min(job.prompt_tokens - 1, depth * 16)


@dataclass
class Done:
    """What became of a job."""

    job: Job
    offered: float
    started: float
    ended: float | None = None
    cached: int = 0

    @property
    def wait(self) -> float:
        """Seconds in the queue."""
        return self.started - self.offered


@dataclass
class _Runs:
    job: Job
    prompt: int
    output: int


@dataclass
class Source:
    """Keeps ``depth`` jobs of its making queued. ``make(serial, now)`` → (job, output it will produce)."""

    make: Callable[[int, float], tuple[Job, int]]
    depth: int
    waiting: int = 0
    serial: int = 0


@dataclass
class Driver:
    """See the module."""

    policy: Any
    slots: int = 4
    step_s: float = 1.0
    chunk: int = 10_000
    cache: Cache | None = None
    queue_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = JobQueue(self.policy, **self.queue_options)
        self.now = 0.0
        self.service: dict[str, float] = {}
        """Cost that ran, by tenant."""
        self.by_class: dict[str, float] = {}
        self.by_user: dict[str, float] = {}
        self.log: list[Done] = []
        """Every job that started, in order."""
        self.gone: list[Job] = []
        """Jobs that expired."""
        self.filled = 0
        """Slots in use during the last step."""
        self._sources: list[Source] = []
        self._source_of: dict[JobId, Source] = {}
        self._output: dict[JobId, int] = {}
        self._running: dict[JobId, _Runs] = {}
        self._log_of: dict[JobId, Done] = {}
        self._offered: dict[JobId, float] = {}
        self._future: list[tuple[float, int, Job, int]] = []

    def backlog(self, make: Callable[[int, float], tuple[Job, int]], depth: int = 8) -> None:
        """Always keep ``depth`` such jobs queued."""
        self._sources.append(Source(make, depth))

    def at(self, when: float, job: Job, output: int) -> None:
        """Offer a job at a moment."""
        heapq.heappush(self._future, (when, len(self._future) + len(self._offered), job, output))

    def offer(self, job: Job, output: int) -> None:
        """Offer a job now, which will produce ``output`` tokens."""
        self.queue.offer(job, self.now)
        self._output[job.id] = output
        self._offered[job.id] = self.now

    def run(self, steps: int) -> Iterator[float]:
        """Yield the time after each step."""
        for _ in range(steps):
            self._arrive()
            self.gone += self.queue.expire(self.now)
            self._fill()
            self.filled = len(self._running)
            self.now += self.step_s
            for runs in list(self._running.values()):
                self._advance(runs)
            yield self.now

    def go(self, steps: int) -> Driver:
        """Run without looking."""
        for _ in self.run(steps):
            pass
        return self

    def finish(self) -> Driver:
        """No more work is offered; run until all of it has ended."""
        self._sources.clear()
        while len(self.queue) or self._running or self._future:
            self.go(1)
        return self

    def _arrive(self) -> None:
        while self._future and self._future[0][0] <= self.now:
            _, _, job, output = heapq.heappop(self._future)
            self.offer(job, output)
        for source in self._sources:
            while source.waiting < source.depth:
                source.serial += 1
                job, output = source.make(source.serial, self.now)
                self.offer(job, output)
                self._source_of[job.id] = source
                source.waiting += 1

    def _fill(self) -> None:
        while len(self._running) < self.slots:
            dispatch = self.queue.next(self.now, always)
            if dispatch is None:
                return
            job = dispatch.job
            source = self._source_of.pop(job.id, None)
            if source is not None:
                source.waiting -= 1
            done = Done(job, self._offered[job.id], self.now)
            done.cached = self.cache.use(job) if self.cache else 0
            self._log_of[job.id] = done
            self.log.append(done)
            self._running[job.id] = _Runs(job, job.prompt_tokens - done.cached, self._output[job.id])
            if done.cached:
                self._charge(job, Charge(0, done.cached, 0))

    def _advance(self, runs: _Runs) -> None:
        job = runs.job
        if runs.prompt:
            step = min(runs.prompt, self.chunk)
            runs.prompt -= step
            self._charge(job, Charge(step, 0, 0))
            if runs.prompt or runs.output:
                return
        elif runs.output:
            runs.output -= 1
            self._charge(job, Charge(0, 0, 1))
        if not runs.prompt and not runs.output:
            self.queue.finish(job.id, Charge(), self.now)
            del self._running[job.id]
            self._log_of[job.id].ended = self.now

    def _charge(self, job: Job, charge: Charge) -> None:
        self.queue.charge(job.id, charge, self.now)
        cost = TARIFF.cost(charge)
        self.service[job.tenant] = self.service.get(job.tenant, 0.0) + cost
        self.by_class[job.service_class] = self.by_class.get(job.service_class, 0.0) + cost
        if job.user is not None:
            self.by_user[job.user] = self.by_user.get(job.user, 0.0) + cost


def percentile(values: list[float], part: float) -> float:
    """The nearest-rank percentile; ``part`` in (0, 1]."""
    ranked = sorted(values)
    return ranked[max(0, -int(-part * len(ranked)) - 1)]


def widest(differences: list[float]) -> float:
    """The largest change between any two moments."""
    return max(differences) - min(differences)
