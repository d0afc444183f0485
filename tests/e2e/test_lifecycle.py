"""Start and stop of the real thing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.arch.source import ROOT
from tests.e2e.harness import BASE, KEY, MODEL, serving, until

STREAM: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell a story."}],
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}


def test_sigterm_finishes_short_streams_cuts_long_ones_and_exits_0(tmp_path: Path) -> None:
    """security 83: readiness 503 at once, streams finish or get an error event inside the drain, exit 0."""
    with serving(tmp_path, {"timeouts": {"drain_s": 10}}) as server:
        assert server.get("/healthz").status_code == 200
        assert server.get("/readyz").status_code == 503, "not ready before the model is loaded (gateway E13)"
        server.wait_ready()
        workers = server.workers()
        started = threading.Barrier(7)
        results: list[list[str]] = []

        def stream(max_tokens: int) -> None:
            url = server.info["url"] + "/v1/chat/completions"
            body = {**STREAM, "max_tokens": max_tokens}
            lines: list[str] = []
            with httpx.stream("POST", url, json=body, headers=server.authorization("search"), timeout=60) as answer:
                for number, line in enumerate(line for line in answer.iter_lines() if line):
                    if number == 2:
                        started.wait(60)
                    lines.append(line)
            results.append(lines)

        threads = [threading.Thread(target=stream, args=(count,)) for count in (20, 20, 20, 20, 4000, 4000)]
        for thread in threads:
            thread.start()
        started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/readyz").status_code == 503, "/readyz 503 while draining")
        refused = server.post({**STREAM, "stream": False})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        for thread in threads:
            thread.join(60)
        assert server.process.wait(30) == 0, server.log
    ends = sorted("error" in lines[-2] or "error" in lines[-1] for lines in results)
    assert ends == [False] * 4 + [True] * 2
    assert all(lines[-1] == "data: [DONE]" for lines in results if "error" not in "".join(lines[-2:]))
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []


def test_healthz_answers_soon_after_the_start(tmp_path: Path) -> None:
    """gateway E11: it does not wait for the model or a download; and what is told to end while it loads, ends."""
    with serving(tmp_path) as server:
        assert server.get("/healthz").status_code == 200
        assert server.get("/readyz").status_code == 503
        assert server.stop() == 0


def serve(config: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``forebay serve`` that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", "serve", str(config), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "FOREBAY_JWT_KEY": KEY, **environment},
    )


def test_a_taken_port_is_one_clear_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({**BASE, "listen": {"port": port}}))
        done = serve(config)
    assert done.returncode == 1
    assert f"error: listen.port: {port} on 127.0.0.1 is already taken" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_mistake_of_a_configuration_is_named_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({**BASE, "listne": {}, "timeouts": {"total_s": -1}}))
    done = serve(config)
    assert done.returncode == 1
    assert "listne" in done.stderr
    assert "timeouts.total_s" in done.stderr
    assert "Traceback" not in done.stderr
