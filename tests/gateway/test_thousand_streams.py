"""A thousand streams with hang-ups and mistakes: one chat span for each that ran, no orphan, nothing ended twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, pool, token
from tests.otlp import OtlpReceiver, check_tree
from workers.testing import Echo

STREAMS = 1_000
ROOT = "POST /v1/completions"


async def one(site: Site, kind: str, gate: asyncio.Semaphore) -> None:
    """One request that ends as ``kind`` says."""
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 12, "stream": True}
    if kind == "mistake":
        body["max_tokens"] = -1
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


async def test_a_thousand_streams(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "65536")  # this is not about what a slow machine drops
    rng = random.Random(3)
    kinds = rng.choices(["ok", "beta", "gone", "gone early", "mistake"], [4, 2, 2, 1, 1], k=STREAMS)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with OtlpReceiver() as collector:
        changes = {
            "telemetry": {"otlp_endpoint": collector.endpoint},
            "models": [pool(blocks=512, max_running=32)],
            "policies": {"scheduling": {"use": "vtc"}},
        }
        async with start(changes, echo=Echo(step_s=0.001, blocks=512)) as site:
            gate = asyncio.Semaphore(100)
            await asyncio.gather(*(one(site, kind, gate) for kind in kinds))
            await site.at_rest(20)
            assert await asyncio.to_thread(site.gateway.parts.telemetry.flush, 20.0)

            began = await site.metric("forebay_requests_total")
            assert await site.metric("forebay_spans_dropped_total") == 0
    traces = {trace: spans for trace, spans in collector.traces().items() if any(span.name == ROOT for span in spans)}
    assert len(traces) == began >= STREAMS - kinds.count("gone early"), "some of these never got as far as the gateway"
    outcomes: Counter[str] = Counter()
    for spans in traces.values():
        tree = check_tree(spans, clock_slack_ns=50_000_000)
        names = Counter(span.name for span in spans)
        assert names["chat echo"] == names["route"] <= 1
        assert names["inference echo"] == names["chat echo"]
        assert names["auth"] == 1
        outcomes[tree.root.attributes["forebay.outcome"]] += 1
    assert outcomes["error"] == kinds.count("mistake")
    assert outcomes["ok"] + outcomes["cancelled"] == began - outcomes["error"]
    assert outcomes["ok"] >= kinds.count("ok") + kinds.count("beta")
    assert outcomes["cancelled"] > kinds.count("gone") / 2
    every = [span for span in collector.spans() if span.name != "engine step"]
    assert len({(span.trace_id, span.span_id) for span in every}) == len(every)
    assert sum(len(spans) for spans in traces.values()) == len(every), "a span without its root"
