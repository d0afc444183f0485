"""A real backend: Arize Phoenix takes the spans of a real gateway and worker over OTLP, and gives them back.

Phoenix lives in an environment of its own (it needs other versions of what we use): the one whose Python
``FOREBAY_TEST_PHOENIX`` names, else one made here, which takes minutes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.test_prometheus import free_port
from tests.e2e.harness import MODEL, serving, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

RELEASE = "arize-phoenix>=20.26,<21"
ROOT = "POST /v1/chat/completions"


@pytest.fixture(scope="session")
def phoenix_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has Phoenix."""
    if given := os.environ.get("FOREBAY_TEST_PHOENIX"):
        return given
    folder = tmp_path_factory.mktemp("phoenix-env")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", RELEASE], check=True)
    return python


@dataclass(frozen=True)
class Phoenix:
    """A running server."""

    http: str
    grpc: str

    def spans(self, trace: str) -> list[dict[str, Any]]:
        """What it stored of one trace."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            answer = httpx.get(f"{self.http}/v1/projects/default/spans", params={"limit": 200, **cursor}, timeout=30)
            page = answer.json()
            found += [span for span in page["data"] if span["context"]["trace_id"] == trace]
            if not page.get("next_cursor"):
                return found
            cursor = {"cursor": page["next_cursor"]}


@contextlib.contextmanager
def phoenix(python: str, folder: Path) -> Iterator[Phoenix]:
    """A server on free loopback ports with a database of its own."""
    port, grpc = free_port(), free_port()
    environment = {
        **os.environ,
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "phoenix.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "phoenix.server.main", "serve"], env=environment, stdout=log, stderr=log
        )
    made = Phoenix(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{grpc}")

    def up() -> bool:
        assert process.poll() is None, (folder / "phoenix.log").read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{made.http}/healthz", timeout=30).status_code == 200
        return False

    try:
        until(up, "Phoenix is up", 180, every=0.5)
        yield made
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_trace_of_both_processes_is_stored_and_read_back(phoenix_python: str, tmp_path: Path, protocol: str) -> None:
    with phoenix(phoenix_python, tmp_path) as backend:
        endpoint = backend.grpc if protocol == "grpc" else backend.http
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        with serving(tmp_path, {}, environment) as server:
            server.wait_ready()
            trace = secrets.token_hex(16)
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "Name a colour."}],
                "max_tokens": 8,
                "temperature": 0,
            }
            answer = server.post(body, traceparent=f"00-{trace}-{'ab' * 8}-01")
            assert answer.status_code == 200
            wanted = {ROOT, "queue", f"chat {MODEL}", f"inference {MODEL}", "prefill", "decode", "quota settle"}

            def whole() -> list[dict[str, Any]] | None:
                found = backend.spans(trace)
                return found if wanted <= {span["name"] for span in found} else None

            spans = until(whole, "the whole trace in Phoenix", 60, every=0.5)
    by_name = {span["name"]: span for span in spans}
    usage = answer.json()["usage"]
    chat = by_name[f"chat {MODEL}"]
    assert chat["span_kind"] == "LLM", "it knows a model call by the GenAI conventions"
    assert chat["attributes"]["llm.token_count.prompt"] == usage["prompt_tokens"]
    assert chat["attributes"]["llm.token_count.completion"] == usage["completion_tokens"]
    assert by_name[f"inference {MODEL}"]["parent_id"] == chat["context"]["span_id"]
    assert chat["parent_id"] == by_name[ROOT]["context"]["span_id"]
    assert by_name[ROOT]["attributes"]["forebay.outcome"] == "ok"
    assert by_name["queue"]["attributes"]["forebay.queue.picked_because"]
    ids = {span["context"]["span_id"] for span in spans}
    assert [span["name"] for span in spans if span["parent_id"] not in ids] == [ROOT]
    assert sys.modules.get("phoenix") is None, "it lives in a process of its own"
