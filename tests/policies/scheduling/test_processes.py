"""State that moves between processes: the same decisions in every process, whatever its hash seed (Issue 4, swap).

Two processes whose strings hash differently run the same script with every policy. Each must decide the same; and a
third run, which loads the first one's dump in the second process, must go on as the first one does by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from policies.testing import make_job
from policies.types import Charge, Job, PrefixKey, RequeueReason
from tests.policies.scheduling.driver import build

CONFIGS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "vtc": {},
    "wfq": {},
    "drr": {},
    "locality": {"quantum": 100, "max_keys": 8},
    "priority": {"floors": {"batch": 0.2, "bulk": 0.2}, "ageing_s": 30.0},
    "edf": {"floors": {"batch": 0.2, "bulk": 0.2, "interactive": 0.2}},
    "sjf": {},
    "hierarchical": {},
    "hierarchical of locality and edf": {
        "outer": {"use": "locality"},
        "inner": {"use": "edf", "with": {"floors": {"batch": 0.3, "bulk": 0.3}}},
    },
}
CLASSES = (("interactive", 2), ("batch", 1), ("bulk", 0))


def job(i: int) -> Job:
    name, priority = CLASSES[i % 3]
    group = i % 5
    return make_job(
        f"job-{i}",
        f"tenant-{i % 7}",
        prompt=32 + 16 * (i % 3),
        output=16,
        user=f"user-{i % 4}",
        service_class=name,
        priority=priority,
        arrived_at=float(i // 14),  # many at once, so that ties have to be broken
        prefix_keys=tuple(PrefixKey(f"{i % 7}:{group}:{k}".encode()) for k in range(3)),
    )


def run(policy: Any, start: int, end: int, running: list[Job]) -> list[str]:
    """Push, dispatch and charge; every seventh dispatch comes back. Returns the jobs in order of dispatch."""
    order = []
    for i in range(start, end):
        now = float(i // 14)
        policy.push(job(i), now)
        if i % 3 == 0:
            continue
        picked = policy.pop(now, lambda job, i=i: job.prompt_tokens <= 48 + 16 * (i % 2))
        if picked is None:
            continue
        order.append(picked.id)
        running.append(picked)
        if len(order) % 7 == 0:
            policy.requeue(running.pop(), now, RequeueReason.WORKER_LOST)
        if len(running) > 4:
            done = running.pop(0)
            policy.charge(done, Charge(done.prompt_tokens, 0, 8), now, True)
    return order


def script(dumps: dict[str, Any] | None) -> dict[str, Any]:
    """Per policy: the first half, its dump and queue, and the second half, from ``dumps`` where they are given."""
    results = {}
    for name, config in CONFIGS.items():
        policy = build(name.partition(" ")[0], **config)
        running: list[Job] = []
        first = run(policy, 0, 200, running)
        state = json.loads(json.dumps(policy.dump()))
        waiting = policy.drain()
        # Both go on from the dump, in a new instance: its own one or the other process's.
        policy = build(name.partition(" ")[0], **config)
        policy.load(state if dumps is None else dumps[name])
        for queued in sorted(waiting, key=lambda job: int(job.id[4:])):
            policy.push(queued, 15.0)
        second = run(policy, 200, 400, running)
        results[name] = {"first": first, "state": state, "second": second, "end": policy.dump()}
    return results


def elsewhere(seed: str, dumps: dict[str, Any] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(dumps),
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return elsewhere("1")


@pytest.fixture(scope="module")
def other() -> dict[str, Any]:
    return elsewhere("2")


@pytest.fixture(scope="module")
def moved(one: dict[str, Any]) -> dict[str, Any]:
    return elsewhere("3", {name: result["state"] for name, result in one.items()})


@pytest.mark.parametrize("name", CONFIGS)
def test_every_process_decides_alike(name: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert len(one[name]["first"]) > 100
    assert one[name] == other[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_dump_goes_on_in_another_process(name: str, one: dict[str, Any], moved: dict[str, Any]) -> None:
    assert len(one[name]["second"]) > 100
    assert moved[name]["second"] == one[name]["second"]
    assert moved[name]["end"] == one[name]["end"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(script(json.load(sys.stdin))))
