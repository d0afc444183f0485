"""What batching and a cache are worth: the same requests served in four ways, from step times alone.

The four differ in the worker only: one request at a time and everything computed again for every token; one at a time
with a cache; batches of 16 that are filled when the last one is empty; 16 slots that are refilled as they come free
(continuous batching: Yu et al., "Orca", OSDI 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.simulate.figures import Figures, mean, percentile
from gateway.simulate.scenario_file import LoadedScenario
from gateway.simulate.simulation import simulate

SLOTS = 16
WAYS: Mapping[str, Mapping[str, Any]] = {
    "one at a time, no cache": {"max_running": 1, "kv_cache_reuse": False, "mode": "continuous"},
    "one at a time, cache": {"max_running": 1, "kv_cache_reuse": True, "mode": "continuous"},
    f"static batches of {SLOTS}": {"max_running": SLOTS, "kv_cache_reuse": True, "mode": "static"},
    f"continuous, {SLOTS} slots": {"max_running": SLOTS, "kv_cache_reuse": True, "mode": "continuous"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One way to serve them."""

    way: str
    total_s: float
    """From the first arrival to the last token."""
    output_tokens_s: float
    latency_mean_s: float | None
    latency_p95_s: float | None
    rows: int
    """Steps of the engine."""


def table(loaded: LoadedScenario) -> list[Row]:
    """Serve the scenario's requests in each way, to the end. Raises ConfigErrors."""
    return [_row(way, _changed(loaded, dict(changes))) for way, changes in WAYS.items()]


def _changed(loaded: LoadedScenario, changes: dict[str, Any]) -> LoadedScenario:
    scenario = loaded.scenario
    workers = scenario.workers.model_copy(update=changes)
    return replace(loaded, scenario=scenario.model_copy(update={"workers": workers, "drain": True}))


def _row(way: str, loaded: LoadedScenario) -> Row:
    figures = Figures.of(simulate(loaded))
    run = figures.run
    latencies = [value for account in run.ledger.accounts for value in account.latencies]
    output = sum(account.output for account in run.ledger.accounts)
    return Row(
        way,
        run.elapsed_s,
        output / run.elapsed_s if run.elapsed_s else 0.0,
        mean(latencies),
        percentile(latencies, 95),
        run.steps,
    )
