"""Scenarios for tests: shipped ones by name, small ones from keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gateway.simulate.scenario_file import LoadedScenario, load, resolve
from policies.registry import Registry

WORKERS: Mapping[str, Any] = {
    "kv_tokens": 1024,
    "block_size": 16,
    "max_running": 8,
    "max_step_tokens": 64,
    "step_ms": {"base": 10, "per_decode": 1, "per_prefill_token": 0.5},
}


def tenant(name: str, arrivals: Mapping[str, Any], prompt: int = 32, output: int = 8, **more: Any) -> dict[str, Any]:
    """A tenant with fixed lengths."""
    return {
        "id": name,
        "arrivals": dict(arrivals),
        "input": {"kind": "fixed", "value": prompt},
        "output": {"kind": "fixed", "value": output},
        **more,
    }


def burst(count: int, at_s: float = 0.0) -> dict[str, Any]:
    return {"kind": "burst", "count": count, "at_s": at_s}


def poisson(rate: float) -> dict[str, Any]:
    return {"kind": "poisson", "rate": rate}


def make(folder: Path, *tenants: Mapping[str, Any], registry: Registry | None = None, **more: Any) -> LoadedScenario:
    """Write a scenario into ``folder`` and load it."""
    data = {"duration_s": 20, "policy": {"use": "fcfs"}, **more, "tenants": list(tenants)}
    data["workers"] = {**WORKERS, **data.get("workers", {})}
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(data))
    return load(path, registry)


def shipped(name: str, policy: str | None = None, seed: int | None = None) -> LoadedScenario:
    """A shipped scenario."""
    return load(resolve(name)).under(policy, seed)
