"""What scheduling costs: ``python -m tests.bench.scheduling_cost [POLICY ...]``.

Per policy, in microseconds: push + pop + charge (median and 99th percentile) with 100,000 jobs of 1,000 tenants queued;
dispatch, charge and finish through ``JobQueue``; a turn in which no worker has room, as the gateway has it
(``gateway.gate.fill``); a policy that is asked and finds nothing that fits. And the milliseconds in which 10,000 queued
jobs move to a fresh instance. Nothing is asserted: the figures depend on the machine. Each policy has
a process of its own, as in a gateway: the memory that earlier ones left behind must not count.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

from gateway.gate import Load, Room, fill
from policies.manager import make_manager
from policies.queue import JobQueue
from policies.registry import Registry
from policies.spi import PolicyContext, SchedulingPolicy
from policies.testing import always, make_job
from policies.types import Charge, Job, PrefixKey, WorkerView

QUEUED = 100_000
TENANTS = 1_000
ROUNDS = 20_000
MOVED = 10_000
CLASSES = (("interactive", 1, 20.0), ("batch", 0, 600.0))
BUDGET_US = 10.0
REGISTRY = Registry.from_manager(make_manager())


@dataclass(frozen=True)
class Figures:
    """Of one policy."""

    median_us: float
    p99_us: float
    queue_us: float
    no_room_us: float
    nothing_fits_us: float
    move_ms: float


def jobs(count: int, prefix: str, start: float = 0.0, keys: int = 0) -> list[Job]:
    """Jobs of many tenants, users, classes and lengths, 1,000 a second from ``start`` on.

    ``keys`` prefix keys each, half of them shared in a tenant.
    """
    rng = random.Random(7)
    made = []
    for i in range(count):
        tenant = rng.randrange(TENANTS)
        name, priority, wait = CLASSES[tenant % 2]
        own = rng.randrange(50)
        chain = [f"{tenant}:{k}" if k < keys // 2 else f"{tenant}:{own}:{k}" for k in range(keys)]
        made.append(
            make_job(
                f"{prefix}{i}",
                f"t{tenant}",
                prompt=64 + rng.randrange(400),
                output=16 + rng.randrange(200),
                weight=float(1 + tenant % 4),
                user=f"u{rng.randrange(8)}",
                service_class=name,
                priority=priority,
                max_wait_s=wait,
                deadline=start + i / 1000 + wait,
                arrived_at=start + i / 1000,
                prefix_keys=tuple(PrefixKey(key.encode()) for key in chain),
            )
        )
    return made


def build(name: str) -> SchedulingPolicy:
    """A policy of the registry."""
    policy: SchedulingPolicy = REGISTRY.build("scheduling", name, {}, PolicyContext())
    return policy


def timed(work: Iterator[Callable[[], object]]) -> list[float]:
    """Microseconds of each piece of work, the clock's own cost taken off."""
    clock = time.thread_time_ns  # a busy machine must not count
    empty = min(-clock() + clock() for _ in range(1000))
    took = []
    for piece in work:
        start = clock()
        piece()
        took.append((clock() - start - empty) / 1000)
    return took


def measure(name: str, keys: int = 0) -> Figures:
    """All figures of one policy."""
    backlog, more = jobs(QUEUED, "q", keys=keys), jobs(2 * ROUNDS, "n", QUEUED / 1000, keys)
    policy = build(name)
    for job in backlog:
        policy.push(job, job.arrived_at)
    charge, now = Charge(100, 20, 60), QUEUED / 1000
    gc.collect()
    gc.freeze()

    def one(job: Job) -> Callable[[], object]:
        def round_trip() -> None:
            policy.push(job, now)
            popped = policy.pop(now, always)
            assert popped is not None
            policy.charge(popped, charge, now, True)

        return round_trip

    took = timed(one(job) for job in more[:ROUNDS])
    queue = JobQueue(policy_with(name, backlog[:MOVED]))
    for job in backlog[MOVED : MOVED + TENANTS * 20]:
        queue.offer(job, job.arrived_at)
    for _ in range(TENANTS * 10):  # everybody was served before
        done = queue.next(now, always)
        assert done is not None
        queue.finish(done.job.id, charge, now)

    def through(job: Job) -> Callable[[], object]:
        def dispatch() -> None:
            queue.offer(job, now)
            picked = queue.next(now, always)
            assert picked is not None
            queue.charge(picked.job.id, charge, now)
            queue.finish(picked.job.id, charge, now)

        return dispatch

    via_queue = timed(through(job) for job in more[ROUNDS : ROUNDS + 4000])
    blocked = timed((lambda: queue.next(now, lambda job: False)) for _ in range(100))
    view = WorkerView("w", "m", "p", max_running=64, free_blocks=1, total_blocks=625, block_size=16)
    rooms = [Room.of(view, [Load(0, 1, started=True)], 512, stale=False)]

    def turn() -> bool:
        return fill(
            queue, rooms, now, claim=lambda job: (1, False), could_fit=always, send=lambda dispatch, rooms: None
        )

    full = timed(turn for _ in range(100))
    moved = []
    for _ in range(5):
        queue = JobQueue(build(name))
        for job in backlog[:MOVED]:
            queue.offer(job, job.arrived_at)
        fresh = build(name)
        gc.disable()  # as the gateway does (``gateway/desk.py``)
        moved += timed(iter([lambda queue=queue, fresh=fresh: queue.swap(fresh, now)]))  # type: ignore[misc]
        gc.enable()
    gc.unfreeze()
    return Figures(
        median_us=statistics.median(took),
        p99_us=statistics.quantiles(took, n=100)[98],
        queue_us=statistics.median(via_queue),
        no_room_us=statistics.median(full),
        nothing_fits_us=statistics.median(blocked),
        move_ms=statistics.median(moved) / 1000,
    )


def policy_with(name: str, queued: list[Job]) -> SchedulingPolicy:
    """An empty policy that has learnt from ``queued``: it was charged for them."""
    policy = build(name)
    for job in queued[:TENANTS]:
        policy.charge(job, Charge(10, 0, 20), 0.0, True)
    return policy


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [item.spec.name for item in REGISTRY.policies("scheduling")]
    parser.add_argument("policies", nargs="*", default=names, help=f"default: {' '.join(names)}")
    parser.add_argument("--keys", type=int, default=0, help="prefix keys per job, for locality (default 0)")
    arguments = parser.parse_args()
    chosen = arguments.policies
    heads = ("median us", "p99 us", "in queue us", "no room us", "nothing fits us", f"{MOVED} move ms")
    write = sys.stdout.write
    write(f"{QUEUED} jobs of {TENANTS} tenants queued; budget {BUDGET_US:.0f} us for push + pop + charge\n")
    write(f"{'policy':13}" + "".join(f"{head:>17}" for head in heads) + "\n")
    if len(chosen) == 1:
        figures = astuple(measure(chosen[0], arguments.keys))
        write(f"{chosen[0]:13}" + "".join(f"{value:17.2f}" for value in figures) + "\n")
        return
    for name in chosen:
        command = [sys.executable, "-m", "tests.bench.scheduling_cost", name, "--keys", str(arguments.keys)]
        write(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1] + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
