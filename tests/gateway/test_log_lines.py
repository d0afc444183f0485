"""A whole gateway's log: exactly one line for each request, however it ends, and ``log`` of the YAML in force."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway import log
from tests.arch.source import ROOT
from tests.gateway.conftest import Start
from tests.gateway.harness import BASE, KEY, MODEL, write_model
from tests.gateway.logs import undisturbed
from workers.testing import Echo


def request_lines(text: str) -> list[dict[str, Any]]:
    """The lines that tell of a request."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "request"]


async def test_as_many_lines_as_requests(start: Start) -> None:
    with undisturbed():
        stream = io.StringIO()
        log.configure("gateway", format="json", level="debug", stream=stream)
        async with start(echo=Echo(step_s=0.001)) as site:
            answers = await asyncio.gather(
                *(site.complete() for _ in range(12)),
                *(site.complete("beta", stream=True) for _ in range(8)),
                *(site.complete(max_tokens=-1) for _ in range(5)),
                *(site.complete("stranger") for _ in range(4)),
                *(site.complete(headers={"authorization": "Bearer nobody"}) for _ in range(3)),
            )
            async with site.stream(max_tokens=2_000) as response:
                async for _ in response.aiter_lines():
                    break
            await site.at_rest()
        lines = request_lines(stream.getvalue())
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses == {200: 20, 400: 5, 403: 4, 401: 3}
    assert len(lines) == len(answers) + 1
    assert len({line["request_id"] for line in lines}) == len(lines)
    assert {answer.headers["x-request-id"] for answer in answers} < {line["request_id"] for line in lines}
    assert Counter(line["outcome"] for line in lines) == {"ok": 20, "error": 12, "cancelled": 1}
    assert Counter(line["status"] for line in lines if line["outcome"] == "error") == {400: 5, 403: 4, 401: 3}


def serve(folder: Path, chosen: dict[str, Any], requests: int) -> str:
    """What ``forebay serve`` logs with ``log: chosen`` in its file while so many requests are refused."""
    write_model(folder / "model")
    elsewhere = {"use": "static", "addresses": ["127.0.0.1:9"], "secret_env": "FOREBAY_JWT_KEY"}
    settings = {
        **BASE,
        "models": [{"name": MODEL, "source": str(folder / "model"), "pools": [{"name": "local", "launch": elsewhere}]}],
        "log": {"format": "json", **chosen},
    }
    config, ready = folder / "forebay.yaml", folder / "ready.json"
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "gateway.cli", "serve", str(config), "--ready-file", str(ready)]
    process = subprocess.Popen(command, cwd=ROOT, env={"FOREBAY_JWT_KEY": KEY}, stderr=-1, stdout=-1, text=True)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() or not ready.read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        url = json.loads(ready.read_text())["url"]
        for _ in range(requests):
            answer = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x"}, timeout=30)
            assert answer.status_code == 401
    finally:
        process.terminate()
        _, logged = process.communicate(timeout=60)
    return logged


@pytest.mark.parametrize(
    ("chosen", "levels", "lines"),
    [
        ({}, {"info"}, 7),
        ({"sample_ratio": 0.0}, {"info"}, 0),
        ({"level": "error"}, set(), 0),
    ],
    ids=["as it comes", "sample_ratio", "level"],
)
async def test_the_files_level_and_sample_ratio(
    chosen: dict[str, Any], levels: set[str], lines: int, tmp_path: Path
) -> None:
    logged = await asyncio.to_thread(serve, tmp_path, chosen, 7)
    assert len(request_lines(logged)) == lines
    written = {json.loads(line)["level"] for line in logged.splitlines() if line.startswith("{")}
    assert written & {"debug", "info"} == levels
