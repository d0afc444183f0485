"""A thousand streams with hang-ups and mistakes: one chat span for each that ran, no orphan, nothing ended twice.

Then a worker dies under a crowd of them: those that had begun end with an error inside their stream, and are told once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterable

import httpx
import pytest

from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, events, pool, tickets, token, until
from tests.otlp import OtlpReceiver, ReceivedSpan, check_tree
from workers.testing import Echo

STREAMS = 1_000
CROWD = 24
"""Streams that run when the worker dies."""
ROOT = "POST /v1/completions"
CHAT = f"chat {MODEL}"
INFERENCE = f"inference {MODEL}"


async def one(site: Site, kind: str, gate: asyncio.Semaphore) -> None:
    """One request that ends as ``kind`` says."""
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 12, "stream": True}
    if kind == "mistake":
        body["max_tokens"] = -1
    if kind == "gone":
        body["max_tokens"] = 150  # it has left before the end, however slow this process is to notice
    headers = {"authorization": f"Bearer {token('alpha' if kind != 'beta' else 'beta')}"}
    async with gate:
        try:
            patience = 0.02 if kind == "gone early" else 30.0
            async with (
                asyncio.timeout(patience),
                site.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
            ):
                async for _ in answer.aiter_lines():
                    if kind == "gone":
                        return
        except (TimeoutError, httpx.HTTPError):
            assert kind in ("gone", "gone early")


async def lose_the_worker(site: Site) -> None:
    """``CROWD`` streams, all past their first token, and their worker killed."""

    async def body() -> str:
        async with site.stream(max_tokens=3000) as answer:
            return "".join([text async for text in answer.aiter_text()])

    crowd = [asyncio.create_task(body()) for _ in range(CROWD)]
    await until(
        lambda: len(tickets(site)) == CROWD and all(ticket.first_token_at for ticket in tickets(site)), "all run"
    )
    [worker] = site.dispatcher.workers
    assert worker.hello is not None
    os.kill(worker.hello.pid, signal.SIGKILL)
    last = [events(text)[-1] for text in await asyncio.gather(*crowd)]
    assert [event["error"]["code"] for event in last] == ["worker_lost"] * CROWD


def ended_twice(spans: Iterable[ReceivedSpan]) -> dict[tuple[str, str], int]:
    """Span ids that were exported more often than once."""
    counts = Counter((span.trace_id, span.span_id) for span in spans)
    return {which: count for which, count in counts.items() if count > 1}


def requests(collector: OtlpReceiver) -> dict[str, list[ReceivedSpan]]:
    """Traces that have a root of ours."""
    return {trace: spans for trace, spans in collector.traces().items() if any(span.name == ROOT for span in spans)}


def test_a_span_that_was_ended_twice_would_be_seen() -> None:
    times = {"start_ns": 1, "end_ns": 2, "attributes": {}, "events": [], "links": [], "error": False}
    one, other = (
        ReceivedSpan(
            name=CHAT, kind="CLIENT", trace_id="1", span_id=span, parent="", tracestate="", resource={}, **times
        )  # type: ignore[arg-type]
        for span in "ab"
    )
    assert ended_twice([one, other]) == {}
    assert ended_twice([one, other, one]) == {("1", "a"): 2}


async def test_a_thousand_streams(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "65536")  # this is not about what a slow machine drops
    rng = random.Random(3)
    kinds = rng.choices(["ok", "beta", "gone", "gone early", "mistake"], [4, 2, 2, 1, 1], k=STREAMS)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with OtlpReceiver() as collector:
        changes = {
            "telemetry": {"otlp_endpoint": collector.endpoint},
            "models": [pool(blocks=8192, max_running=32)],
            "policies": {"scheduling": {"use": "vtc"}},
        }
        async with start(changes, echo=Echo(step_s=0.001)) as site:
            gate = asyncio.Semaphore(100)
            await asyncio.gather(*(one(site, kind, gate) for kind in kinds))
            await site.at_rest()
            telemetry = site.gateway.parts.telemetry
            assert await asyncio.to_thread(telemetry.flush, 20.0)
            began = await site.metric("forebay_requests_total")
            dispatches = await site.metric("forebay_route_decisions_total")
            # The worker sends by itself: what it has of these must be here before it dies.
            await asyncio.to_thread(
                collector.wait, lambda spans: sum(span.name == INFERENCE for span in spans) >= dispatches, 30.0
            )

            await lose_the_worker(site)
            await until(lambda: site.gateway.parts.pipeline.active == 0, "all are told")
            assert await asyncio.to_thread(telemetry.flush, 20.0)
            assert await site.metric("forebay_requests_total") == began + CROWD
            assert await site.metric("forebay_route_decisions_total") == dispatches + CROWD
            assert await site.metric("forebay_spans_dropped_total") == 0
    traces = requests(collector)
    assert began >= STREAMS - kinds.count("gone early"), "some of these never got as far as the gateway"
    assert len(traces) == began + CROWD
    outcomes: Counter[str] = Counter()
    chats = lost = 0
    for spans in traces.values():
        tree = check_tree(spans, clock_slack_ns=50_000_000)
        names = Counter(span.name for span in spans)
        outcome = tree.root.attributes["forebay.outcome"]
        dispatched = "forebay.worker" in tree.root.attributes  # told by the ticket, not by the span
        assert names[CHAT] == names["route"] == (1 if dispatched else 0), outcome
        assert dispatched or outcome != "ok"
        assert names["auth"] == 1
        if tree.root.attributes.get("error.type") == "worker_lost":
            chat = tree.named(CHAT)
            assert dispatched
            assert (tree.root.error, tree.root.attributes["http.response.status_code"]) == (True, 200)
            assert (chat.error, chat.attributes["error.type"]) == (True, "worker_lost")
            lost += 1
        else:
            assert names[INFERENCE] == names[CHAT]
        chats += names[CHAT]
        outcomes[outcome] += 1
    assert lost == CROWD
    assert chats == dispatches + CROWD
    assert outcomes["error"] == kinds.count("mistake") + CROWD
    assert outcomes["ok"] + outcomes["cancelled"] == began + CROWD - outcomes["error"]
    assert outcomes["ok"] >= kinds.count("ok") + kinds.count("beta")
    assert outcomes["cancelled"] > kinds.count("gone") / 2
    assert ended_twice(collector.spans()) == {}
    every = [span for span in collector.spans() if span.name != "engine step"]
    assert sum(len(spans) for spans in traces.values()) == len(every), "a span without its root"
