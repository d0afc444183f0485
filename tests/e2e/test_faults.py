"""Processes that are killed: an error event (promised in 2 s), then service again (in 10 s).

The bounds here are wider than the promises: this runs on machines that do much else at the same time.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.harness import MODEL, Server, serving, until

LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count as far as you can."}],
    "max_tokens": 1500,
    "ignore_eos": True,
    "stream": True,
}
SHORT = {"model": MODEL, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 2}
EVENT_S = 15.0
SERVED_S = 60.0


def events(answer: httpx.Response) -> Any:
    """Parsed events of a stream, ``[DONE]`` as text."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_a_worker_killed_mid_stream_and_a_gateway_killed_after_it(tmp_path: Path) -> None:
    """gateway C5: no fabricated ending; then the next request; then no orphan is left when the gateway dies."""
    with serving(tmp_path) as server:
        server.wait_ready()
        [worker] = server.workers()
        kill_worker_mid_stream(server, worker)
        served_again(server, worker)
        workers = server.workers()
        assert workers
        server.process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=30)
        assert alive == [], "a worker outlived its gateway"
        assert len(gone) == len(workers)


def kill_worker_mid_stream(server: Server, worker: psutil.Process) -> None:
    """The stream ends with an error event, without a finish reason, within ``EVENT_S``."""
    url = server.info["url"] + "/v1/chat/completions"
    with httpx.stream("POST", url, json=LONG, headers=server.authorization("search"), timeout=30) as answer:
        assert answer.status_code == 200
        seen: list[Any] = []
        killed_at = 0.0
        for event in events(answer):
            seen.append(event)
            if len(seen) == 5:
                worker.send_signal(signal.SIGKILL)
                killed_at = time.monotonic()
            if "error" in event:
                assert time.monotonic() - killed_at < EVENT_S
    errors = [event for event in seen if isinstance(event, dict) and "error" in event]
    assert len(errors) == 1, seen[-3:]
    assert set(errors[0]["error"]) == {"message", "type", "param", "code"}
    reasons = [choice["finish_reason"] for event in seen if "choices" in event for choice in event["choices"]]
    assert set(reasons) == {None}


def served_again(server: Server, killed: psutil.Process) -> None:
    """A request passes within ``SERVED_S``, computed by another process."""
    until(lambda: server.post(SHORT).status_code == 200, "a request served after the worker was killed", SERVED_S)
    assert killed.pid not in [worker.pid for worker in server.workers()]
