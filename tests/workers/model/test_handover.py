"""Keys and values of a real model from one engine to another: tokens as of one engine that does all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench
from tests.workers.transfer.pair import Direct, Side, both
from workers.config import EngineConfig
from workers.model.draft import DraftRunner
from workers.model.loading import load
from workers.model.mover import layout_of, mover_of
from workers.protocol import Generate

BASE: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 16, "blocks": 64}
PROMPT = [*range(40, 120), *range(60, 101)]
NEW_TOKENS = 24
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "native": {"attention": "native"},
    "batched": {"attention": "batched"},
    "native, int8 keys and values": {"attention": "native", "kv_dtype": "int8"},
    "batched, int8 keys and values": {"attention": "batched", "kv_dtype": "int8"},
    "int8 weights": {"weight_dtype": "int8"},
    "n-gram speculation": {"speculation": {"method": "ngram", "ngram_min": 1}},
    "small chunks": {"max_chunk_tokens": 7},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.model(hidden_size=64, intermediate_size=64, head_dim=16)
    return tiny.write_directory(made, tmp_path_factory.mktemp("tiny"))


async def handed_over(source: Path, settings: Mapping[str, Any]) -> list[int]:
    """The answer of a decode engine whose prompt another engine computed."""
    wire = Direct()
    sides = {}
    for role in ("prefill", "decode"):
        engine = EngineConfig(**BASE, **settings, role=role)  # type: ignore[arg-type]
        loaded = load(source, engine)
        mover = mover_of(loaded.runner)
        sides[role] = Side(
            engine,
            wire,
            blocks=loaded.blocks,
            runner=loaded.runner,
            mover=mover,
            layout=layout_of(mover, loaded.revision, loaded.dtype, engine),
            revision=loaded.revision,
        )
    wire.source = sides["prefill"].desk
    full = (len(PROMPT) - 1) // 16 * 16
    first, second = both(Generate("r", PROMPT, NEW_TOKENS, GREEDY, scope=b"scope"), size=16)
    sides["prefill"].deliver(first)
    sides["decode"].deliver(second)
    last = await sides["decode"].ended("r")
    assert sides["decode"].results == ["ok"]
    assert wire.pulled > 0
    assert (last.prompt_computed, last.prompt_cached) == (len(PROMPT), 0)
    assert sides["decode"].engine.planner.pool.hit_tokens == full
    for side in sides.values():
        await side.until(lambda side=side: not side.engine._handover.leases)  # type: ignore[misc]
        await side.close()
    return sides["decode"].tokens["r"]


@pytest.mark.parametrize("name", SETTINGS)
async def test_tokens_are_those_of_one_engine(name: str, source: Path) -> None:
    alone = Bench(source, EngineConfig(**BASE, **SETTINGS[name]))
    whole = alone.run([Generate("r", PROMPT, NEW_TOKENS, GREEDY, scope=b"scope")])[0].tokens
    assert await handed_over(source, SETTINGS[name]) == whole


async def test_a_draft_model_goes_on_from_what_arrived(source: Path) -> None:
    """It has not seen these tokens: it computes them itself, and guesses nothing from what the blocks held before."""
    settings = {"speculation": {"method": "draft", "draft_model": str(source)}}
    alone = Bench(source, EngineConfig(**BASE))
    whole = alone.run([Generate("r", PROMPT, NEW_TOKENS, GREEDY, scope=b"scope")])[0].tokens
    assert await handed_over(source, settings) == whole


def test_a_draft_model_forgets_what_is_written_over(source: Path) -> None:
    """Or it would guess from what the blocks' last owner left in its own cache."""
    speculation = {"method": "draft", "draft_model": str(source)}
    runner = load(source, EngineConfig(**BASE, role="decode", speculation=speculation)).runner
    assert isinstance(runner, DraftRunner)
    runner._filled[:] = 16
    mover = mover_of(runner)
    mover.write([3, 5], bytes(2 * mover.block_bytes))
    assert [block for block, filled in enumerate(runner._filled) if not filled] == [3, 5]


def test_blocks_read_from_one_cache_are_the_same_in_another(source: Path) -> None:
    engine = EngineConfig(**BASE, role="decode")
    one, two = (mover_of(load(source, engine).runner) for _ in range(2))
    data = bytes(range(256)) * (2 * one.block_bytes // 256)
    one.write([3, 5], data)
    two.write([7, 1], one.read([3, 5]))
    assert two.read([7, 1]) == data
    with pytest.raises(ValueError, match="are not 2 blocks"):
        two.write([1, 2], data[:-1])


def test_a_layout_is_equal_only_where_bytes_mean_the_same(source: Path) -> None:
    def layout(revision: str = "rev", dtype: str = "float32", **changes: Any) -> str:
        engine = EngineConfig(**{**BASE, "role": "decode", **changes})
        return layout_of(mover_of(load(source, engine).runner), revision, dtype, engine)

    plain = layout()
    assert plain == layout(blocks=32, max_running=3, role="prefill")
    others = [
        layout("other"),
        layout(dtype="bfloat16"),
        layout(block_size=32),
        layout(kv_dtype="int8"),
        layout(weight_dtype="int8"),
        layout(attention="batched"),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_a_runner_without_a_cache_of_its_own_hands_nothing_over() -> None:
    with pytest.raises(ValueError, match="write role: both"):
        mover_of(object())


def test_blocks_that_no_message_holds_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.model.mover.MOST_BYTES", 1024)
    with pytest.raises(ValueError, match=r"lower engine\.block_size"):
        mover_of(load(source, EngineConfig(**BASE)).runner)
