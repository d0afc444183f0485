"""The files of ``config/deploy`` as data, and every query in them."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from typing import Any

import yaml

from tests.arch.source import ROOT

CONFIG = ROOT / "config"
DEPLOY = CONFIG / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RATE_INTERVAL = "1m"
"""What ``$__rate_interval`` becomes where no Grafana puts in its own."""


def read(name: str) -> Any:
    """One YAML file, by its path below ``config``."""
    return yaml.safe_load((CONFIG / name).read_text())


def generator() -> dict[str, Any]:
    """What ``scripts/dashboards``, which belongs to no package, defines."""
    return runpy.run_path(str(ROOT / "scripts" / "dashboards"))


def alerts() -> list[dict[str, Any]]:
    """Every alert rule."""
    return [rule for group in read("deploy/prometheus/alerts.yaml")["groups"] for rule in group["rules"]]


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """(dashboard and panel, panel) of every panel."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            yield f"{path.stem}: {panel['title']}", panel


def queries() -> dict[str, str]:
    """Every PromQL query by where it is, Grafana's variables filled in."""
    found = {f"alert: {rule['alert']}": rule["expr"] for rule in alerts()}
    for name, panel in panels():
        for target in panel["targets"]:
            filled = target["expr"].replace("$__rate_interval", RATE_INTERVAL).replace("$tenant", ".*")
            found[f"{name} {target['refId']}"] = filled
    return found
