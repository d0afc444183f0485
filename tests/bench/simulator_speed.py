"""How fast the simulator is: ``python -m tests.bench.simulator_speed [--policy P]``.

Requests simulated per second of processor time, the best of three: short answers under fcfs at full load, as a burst
and one by one; and the shipped scenario ``two-tenants``. Nothing is asserted: the figures depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from gateway.simulate.scenario_file import LoadedScenario, load, resolve
from gateway.simulate.simulation import simulate

WORKERS = {
    "kv_tokens": 100_000,
    "max_running": 64,
    "max_step_tokens": 2048,
    "step_ms": {"base": 5, "per_decode": 0.05, "per_prefill_token": 0.002},
}


def short(folder: Path, output: int, arrivals: dict[str, Any]) -> LoadedScenario:
    """Prompts of 16 tokens and answers of ``output``, until all are served."""
    length = {"kind": "fixed", "value": 16}
    tenant = {"id": "a", "arrivals": arrivals, "input": length, "output": {"kind": "fixed", "value": output}}
    data = {"duration_s": 20, "drain": True, "policy": {"use": "fcfs"}, "workers": WORKERS, "tenants": [tenant]}
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(data))
    return load(path)


def measure(name: str, loaded: LoadedScenario, rounds: int = 3) -> None:
    """Print one line."""
    best, requests, steps = 0.0, 0, 0
    for _ in range(rounds):
        began = time.process_time()
        run = simulate(loaded)
        took = time.process_time() - began
        best, requests, steps = max(best, run.requests / took), run.requests, run.steps
    sys.stdout.write(f"{name:<44} {requests:>8,} requests {steps:>8,} steps {best:>9,.0f} requests/s\n")


def main(arguments: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="fcfs")
    policy = parser.parse_args(arguments).policy
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for output in (1, 2, 4, 8):
            burst = short(folder, output, {"kind": "burst", "count": 20_000})
            measure(f"{policy}, burst, answers of {output}", burst.under(policy))
        single = short(folder, 1, {"kind": "poisson", "rate": 1000})
        measure(f"{policy}, one by one, answers of 1", single.under(policy))
    measure(f"{policy}, two-tenants (256 + 256 tokens)", load(resolve("two-tenants")).under(policy))


if __name__ == "__main__":
    main(sys.argv[1:])
