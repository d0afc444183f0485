"""A model on two devices behind a real gateway: served by two processes, and by two others when one of them fails."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.harness import MODEL, Server, serving, until
from tests.e2e.test_faults import events
from tests.workers import tiny_model

LONG: dict[str, Any] = {"model": MODEL, "prompt": "one two three", "max_tokens": 480, "ignore_eos": True}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 4, "temperature": 0}
TIMEOUT_S = 2.0
ERROR_S = 30.0
"""Ample: at once for a killed rank, the timeout for one that hangs."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    source = folder / "tiny"
    source.mkdir()
    tiny_model.write(source)
    engine = {
        "device": "cpu",
        "dtype": "float32",
        "blocks": 64,
        "threads": 1,
        "tensor_parallel": 2,
        "rank_timeout_s": TIMEOUT_S,
    }
    models = [{"name": MODEL, "source": str(source), "pools": [{"name": "local", "engine": engine}]}]
    with serving(folder, {"models": models}) as running:
        running.wait_ready()
        yield running


def ranks(worker: psutil.Process) -> list[psutil.Process]:
    """The worker's other ranks."""
    return [child for child in worker.children() if "workers.model.parallel.rank" in child.cmdline()]


def complete(server: Server, body: dict[str, Any]) -> httpx.Response:
    url = server.info["url"] + "/v1/completions"
    return httpx.post(url, json=body, headers=server.authorization("search"), timeout=60)


def alive(server: Server) -> float:
    """The metric of the only worker."""
    [worker] = server.admin("/admin/workers").json()["workers"]
    assert worker["ranks"] == 2
    text = httpx.get(f"http://127.0.0.1:{worker['metrics_port']}/metrics", timeout=30).text
    found = re.search(r"^forebay_ranks_alive (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_two_ranks_serve(server: Server) -> None:
    [worker] = server.workers()
    assert len(ranks(worker)) == 1
    assert alive(server) == 2
    answer = server.client().completions.create(**{key: value for key, value in SHORT.items() if key != "ignore_eos"})
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_rank_that_fails_costs_clean_errors_and_a_new_worker(server: Server, number: signal.Signals) -> None:
    """Killed: at once. Stopped, so that it hangs: after the timeout. Then two other processes serve."""
    [worker] = server.workers()
    [rank] = ranks(worker)
    url = server.info["url"] + "/v1/completions"
    seen: list[Any] = []
    failed_at = 0.0
    with httpx.stream(
        "POST", url, json={**LONG, "stream": True}, headers=server.authorization("search"), timeout=60
    ) as answer:
        for event in events(answer):
            seen.append(event)
            if len(seen) == 1:
                rank.send_signal(number)
                failed_at = time.monotonic()
    assert time.monotonic() - failed_at < ERROR_S
    assert "error" in seen[-1] or "error" in seen[-2], seen[-2:]
    reasons = [choice["finish_reason"] for event in seen if "choices" in event for choice in event["choices"]]
    assert set(reasons) == {None}
    until(lambda: complete(server, SHORT).status_code == 200, "a request served afterwards", 60)
    [now] = server.workers()
    assert now.pid != worker.pid
    assert psutil.wait_procs([worker, rank], timeout=30)[1] == []
    assert len(ranks(now)) == 1
    assert alive(server) == 2


def test_no_rank_outlives_the_gateway(server: Server) -> None:
    """Last here: the gateway is killed."""
    [worker] = server.workers()
    others = ranks(worker)
    assert len(others) == 1
    server.process.kill()
    assert psutil.wait_procs([worker, *others], timeout=30)[1] == []
