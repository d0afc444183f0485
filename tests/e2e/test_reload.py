"""A configuration that changes while requests run: by command, by signal, and one that is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from tests.arch.source import ROOT
from tests.e2e.harness import BASE, MODEL, Server, merged, serving, until

QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def reload(server: Server) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", "config", "reload", "--url", server.info["admin_url"]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        env=dict(os.environ),
    )


def scheduling(server: Server) -> str:
    return str(server.admin("/admin/policies").json()["policies"]["scheduling"]["use"])


def test_reload_swaps_policies_and_tenants_or_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert scheduling(server) == "vtc"
        assert server.post(QUESTION, "newcomer").status_code == 403
        tenants = [*BASE["tenants"], {"id": "newcomer"}]
        changed = merged(BASE, {"policies": {"scheduling": {"use": "fcfs"}}, "tenants": tenants})
        server.config.write_text(yaml.safe_dump(changed))
        done = reload(server)
        assert done.returncode == 0, done.stderr
        assert "In force now: policies.scheduling, tenants[newcomer]." in done.stderr
        assert scheduling(server) == "fcfs"
        # Known now; whether the model is loaded already does not matter here.
        assert server.post(QUESTION, "newcomer").status_code in {200, 503}
        server.config.write_text(yaml.safe_dump(merged(changed, {"policies": {"scheduling": {"use": "vct"}}})))
        wrong = reload(server)
        assert wrong.returncode == 1
        assert "policies.scheduling.use" in wrong.stderr
        assert scheduling(server) == "fcfs"
        server.config.write_text(yaml.safe_dump(BASE))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: scheduling(server) == "vtc", "the scheduling policy after SIGHUP")
        assert server.stop() == 0
