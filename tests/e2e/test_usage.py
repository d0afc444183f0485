"""Tokens, money and device time of a real worker: the ledger says what the engine counted."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import MODEL, Server, serving, until

CHANGES: dict[str, Any] = {
    "policies": {"quota": {"use": "ledger"}},
    "prices": {"models": {MODEL: {"input": 1, "cached_input": 0.5, "output": 4}}, "price_per_device_hour": 2},
}


def engine_counted(server: Server) -> dict[str, float]:
    """The worker's own counters, from its metrics port."""
    (worker,) = server.admin("/admin/workers").json()["workers"]
    text = httpx.get(f"http://127.0.0.1:{worker['metrics_port']}/metrics", timeout=30).text
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^(forebay_engine_\w+_sum)(\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        found[name + labels] = float(value)
    return found


def test_the_ledger_says_what_the_engine_counted(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """issue 5: figures equal the engine's, and outlive kill -9 of the gateway."""
    changes = {**CHANGES, "state": {"path": str(tmp_path / "state")}}
    with serving(tmp_path, changes) as server:
        server.wait_ready()
        told = [0, 0]
        for number in range(6):
            text = f"Tale {number} of many: tell how it ends, in a few words."
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 12 + number}
            usage = server.post(body, "search" if number % 2 else "assist").json()["usage"]
            told[0] += usage["prompt_tokens"]
            told[1] += usage["completion_tokens"]
        stopped = server.post({**body, "stop": ["e"]}).json()["usage"]  # its end comes from the worker afterwards
        told[0] += stopped["prompt_tokens"]
        told[1] += stopped["completion_tokens"]

        def settled() -> Any:
            report = server.admin("/admin/usage?group_by=tenant").json()
            used = report["total"]["device_seconds"]
            computed = report["devices"]["seconds"].get("computed", 0)
            return report if computed and abs(used - computed) < 0.02 * computed else None

        report = until(settled, "all device time is told")
        total = report["total"]
        assert (total["requests"], total["input_tokens"], total["output_tokens"]) == (7, *told)
        counted = engine_counted(server)
        prefilled = sum(value for name, value in counted.items() if "step_tokens" in name and "prefill" in name)
        assert prefilled == total["input_tokens"] - total["cached_tokens"]
        assert total["device_cost_per_request"] is not None
        devices = server.admin("/admin/usage").json()["devices"]
        assert devices["seconds"]["idle"] > 0

        before = server.admin("/admin/usage").json()["total"]
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(30)
    with serving(tmp_path_factory.mktemp("again"), changes) as server:
        after = server.admin("/admin/usage").json()["total"]
        assert {name: after[name] for name in ("requests", "input_tokens", "output_tokens", "cost")} == {
            name: before[name] for name in ("requests", "input_tokens", "output_tokens", "cost")
        }
