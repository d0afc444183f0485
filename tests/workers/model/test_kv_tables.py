"""Layers over block tables, and what windows save in the real cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench
from tests.workers.model.test_techniques import BASE, EVERY, EXACT, crowd, settings, switch_of
from workers.config import EngineConfig
from workers.model.config import ModelConfig, RopeConfig
from workers.model.kv_tables import one_table, tables_of
from workers.protocol import Generate, WorkerStats

CONFIG = ModelConfig("Gemma3ForCausalLM", 300, 64, 96, 18, 4, 1, 32, 4096, 1e-6, RopeConfig(), True)
MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
    "sliding_window": 32,
}


def gemma(layers: int, window: int = 512) -> ModelConfig:
    return replace(CONFIG, layers=layers, windows=tuple(window * ((layer + 1) % 6 != 0) for layer in range(layers)))


@pytest.mark.parametrize(
    ("layers", "depth", "full", "windowed"),
    [(18, 3, 1, 5), (26, 4, 1, 6), (34, 5, 1, 6), (48, 8, 1, 5), (62, 11, 1, 5)],
)
def test_gemmas_layers_over_tables(layers: int, depth: int, full: int, windowed: int) -> None:
    """270M, 1B, 4B, 12B, 27B: few tables, little waste, every layer in a place of its own."""
    tables = tables_of(gemma(layers), 32768)
    assert (tables.depth, tables.windows) == (depth, (0,) * full + (512,) * windowed)
    assert len(set(tables.places)) == layers
    assert tables.count * depth <= 1.2 * layers
    assert [tables.window(layer) for layer in (0, 5)] == [512, 0]


def test_a_window_that_no_context_exceeds_is_none() -> None:
    assert tables_of(gemma(18), 512) == one_table(18)
    assert tables_of(CONFIG, 4096) == one_table(18)
    assert tables_of(gemma(18), 513).count == 6


def test_a_window_in_every_layer_is_one_table() -> None:
    assert tables_of(replace(CONFIG, windows=(64,) * 18), 4096).windows == (64,)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.model(3, "gemma3_text", **MODEL, query_pre_attn_scalar=32)
    return tiny.write_directory(made, tmp_path_factory.mktemp("gemma"))


def engine(attention: str, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "blocks": 600,
        "attention": attention,
    }
    return EngineConfig(**{**settings, **changes})


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a window, one without: what the switches' examples are made for."""
    kinds = ["sliding_attention", "full_attention"]
    made = tiny.model(3, "gemma3_text", **{**MODEL, "num_hidden_layers": 2, "layer_types": kinds})
    return tiny.write_directory(made, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"expert_parallel"}))
def test_every_switch_works_with_windows_or_is_refused(name: str, two_layers: Path, tmp_path: Path) -> None:
    """In a pool in which sequences are preempted: the tokens of a large pool, but for what a lossy switch does."""
    source = two_layers
    changes = settings((name,), tmp_path)
    try:
        found = crowd(source, EngineConfig(**{**changes, "blocks": 22}))
    except ValueError as error:
        if switch_of(name) not in str(error) or "window" not in str(error):
            pytest.fail(f"refused without naming the switch and the window: {error}")
        return
    lossy = {} if switch_of(name) in EXACT else changes
    assert found == crowd(source, EngineConfig(**{**BASE, **lossy, "blocks": 600}))


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_bytes_saved_at_four_windows(source: Path, attention: str) -> None:
    """A context of 4 windows of 32 holds less than half of what one table for all layers would."""
    bench = Bench(source, engine(attention, max_step_tokens=32))
    seen: list[WorkerStats] = []
    take = bench.engine._on_outputs

    def note(news: Any) -> None:
        seen.append(news.stats)
        take(news)

    bench.engine._on_outputs = note
    bench.run([Generate("long", [5 + index % 200 for index in range(120)], 8, GREEDY)])
    held, outside = max((stats.windows["32"] for stats in seen), key=lambda pair: pair[1])
    full, _ = max(stats.windows["all"] for stats in seen)
    assert full == 8
    assert held + outside == 5 * 8
    assert (full + held) / (full + held + outside) < 0.5


@pytest.mark.parametrize("attention", ["native", "batched"])
@pytest.mark.parametrize("length", [31, 32, 33, 64])
def test_hits_at_the_edges_of_the_window_change_no_token(source: Path, attention: str, length: int) -> None:
    """window - 1, window, window + 1, 2 windows: the same tokens and log probabilities as without a cache."""
    prompt = [7 + (5 * index) % 211 for index in range(length)]
    again = Generate("again", [*prompt, 9, 4], 20, GREEDY)
    fresh = Bench(source, engine(attention, prefix_cache=False)).run([again])[0]
    bench = Bench(source, engine(attention))
    bench.run([Generate("first", prompt, 90, GREEDY)])
    found = bench.run([again])[0]
    assert found.last is not None
    assert found.last.prompt_cached == length // 16 * 16
    assert found.tokens == fresh.tokens
    assert found.logprobs == pytest.approx(fresh.logprobs, abs=0 if attention == "native" else 1e-4)


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_a_long_prompt_again_and_again_and_changed_at_its_end(source: Path, attention: str) -> None:
    """engine B1, B3 and B5: five windows long, in one slot. Every repeat answers as the first one, which nothing was
    cached for; with other last tokens all is hit but what the edit and its block take."""
    prompt, edit = [7 + (5 * index) % 211 for index in range(165)], 8
    changed = [*prompt[:-edit], *range(1, 1 + edit)]
    bench = Bench(source, engine(attention, max_running=1, max_step_tokens=48))
    repeats = [bench.run([Generate(f"r{time}", prompt, 24, GREEDY)])[0] for time in range(4)]
    assert [one.tokens for one in repeats] == [repeats[0].tokens] * 4
    assert [one.last.prompt_cached for one in repeats if one.last is not None] == [0, 160, 160, 160]
    found = bench.run([Generate("changed", changed, 24, GREEDY)])[0]
    assert found.last is not None
    assert found.last.prompt_cached >= len(prompt) - 16 - edit
    fresh = Bench(source, engine(attention, prefix_cache=False)).run([Generate("fresh", changed, 24, GREEDY)])[0]
    assert found.tokens == fresh.tokens


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_nothing_of_another_sequence_is_read_behind_the_window(source: Path, attention: str) -> None:
    """What was given back is poisoned, as another sequence might: no token and no logit changes."""
    request = Generate("one", [11 + index % 150 for index in range(100)], 30, GREEDY)
    expected = Bench(source, engine(attention)).run([request])[0]
    bench = Bench(source, engine(attention, max_chunk_tokens=16))
    bench.engine.submit(request)
    cache, pool = bench.model.runner.cache, bench.engine.planner.pool
    axis = 2 if attention == "batched" else 1
    while bench.engine.step():
        loose = [block for block, users in enumerate(pool.ref) if not users]
        with torch.inference_mode():
            cache.data.index_fill_(axis, torch.tensor(loose), float("nan"))
    found = bench.done["one", 0]
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=0 if attention == "native" else 1e-4)
