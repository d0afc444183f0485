"""The worker's metrics, scraped over HTTP as Prometheus does."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway import tracing
from workers.metrics import BUSY_WINDOW_S, Sources, WorkerMetrics
from workers.protocol import TierStats, WorkerStats

SECOND = 10**9


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 10**18

    def __call__(self) -> int:
        return self.now


def scrape(port: int) -> dict[str, float]:
    """Samples by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        text = response.read().decode()
    return {
        sample.name + "".join(f",{key}={sample.labels[key]}" for key in sorted(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_shows_the_engine() -> None:
    stats = WorkerStats(
        free_blocks=5, cached_blocks=6, used_blocks=7, running=3, waiting=2, preemptions=4, hit_tokens=80,
        query_tokens=100, drafts_accepted=12, drafts_rejected=13,
        tiers={"host": TierStats(7, 6, 5, 4), "disk": TierStats(errors=3, up=False, early_blocks=2)},
    )  # fmt: skip
    metrics = WorkerMetrics(
        Sources(
            lambda: stats,
            lambda: {"lru": 9},
            lambda: {"weights": 10, "kv": 20},
            36,
            lambda: (1, 2),
            lambda: 2,
            lambda: 3,
        )
    )
    metrics.step(tracing.step(1, 10**18, ["a", "b"], took_ns=30_000_000))
    port, stop = metrics.serve()
    try:
        found = scrape(port)
    finally:
        stop()
    assert found["forebay_engine_running"] == 3
    assert found["forebay_ranks_alive"] == 2
    assert found["forebay_engine_kernels_compiled_total"] == 3
    assert found["forebay_engine_waiting"] == 2
    assert [found[f"forebay_engine_kv_blocks,state={state}"] for state in ("free", "cached", "used")] == [5, 6, 7]
    assert found["forebay_engine_kv_bytes_per_token"] == 36
    assert found["forebay_engine_preemptions_total"] == 4
    assert found["forebay_engine_prefix_cache_queries_tokens_total"] == 100
    assert found["forebay_engine_prefix_cache_hits_tokens_total"] == 80
    assert found["forebay_evictions_total,reason=lru"] == 9
    assert found["forebay_speculation_tokens_total,result=accepted"] == 12
    assert found["forebay_speculation_tokens_total,result=rejected"] == 13
    told = ("bytes", "hits_tokens_total", "restored_blocks_total", "saved_blocks_total", "errors_total", "up")
    assert [found[f"forebay_tier_{name},tier=host"] for name in told] == [7, 6, 5, 4, 0, 1]
    assert [found[f"forebay_tier_{name},tier=disk"] for name in told] == [0, 0, 0, 0, 3, 0]
    assert found["forebay_tier_early_blocks_total,tier=disk"] == 2
    assert found["forebay_device_memory_bytes,kind=kv"] == 20
    assert found["forebay_engine_step_seconds_sum"] == pytest.approx(0.03)
    assert found["forebay_engine_batch_size_sum"] == 2
    assert found["forebay_engine_step_tokens_sum,phase=prefill"] == 1
    assert found["forebay_engine_step_tokens_sum,phase=decode"] == 3


def test_busy_ratio_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    metrics = WorkerMetrics(Sources(WorkerStats), clock_ns=clock)
    assert metrics.busy_ratio() == 0.0
    for _ in range(100):  # each step takes 100 ms, half of it in the model
        clock.now += SECOND // 10
        metrics.step(tracing.step(1, clock.now - SECOND // 10, ["a"], took_ns=SECOND // 10))
    assert metrics.busy_ratio() == pytest.approx(0.5)
    clock.now += int(BUSY_WINDOW_S / 2) * SECOND
    assert metrics.busy_ratio() == pytest.approx(0.25, abs=0.01)
    clock.now += int(BUSY_WINDOW_S) * SECOND
    assert metrics.busy_ratio() == 0.0
