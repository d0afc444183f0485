"""Every pair of the engine's switches works together or is refused at start.

Works: greedy tokens of a crowd with shared prefixes, in a pool so small that sequences are preempted, are those of the
same model with the pair's lossy switches only (an exact switch changes no token), and no block is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.workers.model import adapters, tiny
from tests.workers.model.harness import GREEDY, Bench
from workers.config import EngineConfig
from workers.protocol import Generate
from workers.techniques import SWITCHES

pytestmark = pytest.mark.usefixtures("ranks_as_threads")

EXAMPLES: Mapping[str, Callable[[Path], Mapping[str, Any]]] = {
    "attention": lambda folder: {"attention": "batched"},
    "mode": lambda folder: {"mode": "static"},
    "kv_cache_reuse": lambda folder: {"kv_cache_reuse": False},
    "prefix_cache": lambda folder: {"prefix_cache": False},
    "max_chunk_tokens": lambda folder: {"max_chunk_tokens": 5},
    "cache_share": lambda folder: {"cache_share": 0.5},
    "adapter_memory": lambda folder: {"adapter_memory": "1MiB"},
    "adapters": lambda folder: {"adapters": [{"name": "tiny", "source": str(adapters.smallest(folder / "tiny"))}]},
    "kv_dtype": lambda folder: {"kv_dtype": "int8"},
    "speculation": lambda folder: {"speculation": {"method": "ngram", "ngram_min": 1}},
    "role": lambda folder: {"role": "decode"},
    "weight_dtype": lambda folder: {"weight_dtype": "int4"},
    "tensor_parallel": lambda folder: {"tensor_parallel": 2},
    "pipeline_parallel": lambda folder: {"pipeline_parallel": 2},
    "tiers": lambda folder: {
        "tiers": [
            {"kind": "host", "size": "64KiB"},
            {"kind": "disk", "path": str(folder / "kv"), "size": "1MiB"},
        ]
    },
}
"""The smallest setting of each switch that turns it on. ``folder`` may hold what it names; it is the pair's own."""
BASE: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 16, "blocks": 11}
EXACT = {switch.field for switch in SWITCHES if switch.exact}
PAIRS = list(combinations([switch.field for switch in SWITCHES], 2))
SPREAD = {"tensor_parallel", "pipeline_parallel"}
"""They start processes."""
SPREAD_OFTEN = SPREAD | {"prefix_cache", "max_chunk_tokens", "kv_dtype", "speculation", "tiers"}
"""With these they are run every time, with the others in the long suite."""


def _pair(first: str, second: str) -> Any:
    pair = {first, second}
    often = not pair & SPREAD or pair <= SPREAD_OFTEN
    return pytest.param(first, second, id=f"{first}-{second}", marks=() if often else pytest.mark.long)


PROMPTS = [[*range(40, 73), 100 + own, 7, 9 + own] for own in range(4)] + [
    [5, 5, 6, 5, 5, 6, 5, 5],
    list(range(90, 107)),
]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that the kernel can run as well."""
    made = tiny.model(hidden_size=64, intermediate_size=64, head_dim=16)
    return tiny.write_directory(made, tmp_path_factory.mktemp("tiny"))


def crowd(source: Path, engine: EngineConfig) -> list[list[int]]:
    """The tokens of every prompt, all at once; the first comes a second time, when its prefix may be cached."""
    bench = Bench(source, engine)
    requests = [Generate(f"r{number}", prompt, NEW_TOKENS, GREEDY) for number, prompt in enumerate(PROMPTS)]
    found = bench.run(requests, stagger=1) + bench.run([Generate("again", PROMPTS[0], NEW_TOKENS, GREEDY)])
    pool = bench.engine.planner.pool
    assert pool.used == 0
    if bench.model.ranks is not None:
        bench.model.ranks.close()
    return [one.tokens for one in found]


def settings(names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    return {**BASE, **{key: value for name in names for key, value in EXAMPLES[name](folder).items()}}


@pytest.fixture(scope="module")
def expected(source: Path) -> Callable[[tuple[str, ...], Path], list[list[int]]]:
    """What the lossy switches give by themselves; computed once for each set of them."""
    known: dict[tuple[str, ...], list[list[int]]] = {}

    def look_up(lossy: tuple[str, ...], folder: Path) -> list[list[int]]:
        if lossy not in known:
            known[lossy] = crowd(source, EngineConfig(**{**settings(lossy, folder), "blocks": 256}))
        return known[lossy]

    return look_up


def test_every_switch_has_an_example_that_turns_it_on(tmp_path: Path) -> None:
    """And nothing else has one."""
    assert set(EXAMPLES) == {switch.field for switch in SWITCHES}
    for name in EXAMPLES:
        config = EngineConfig(**settings((name,), tmp_path))
        assert getattr(config, name) != EngineConfig.model_fields[name].default


def test_the_crowd_preempts_and_hits(source: Path) -> None:
    """Or the matrix would show little."""
    bench = Bench(source, EngineConfig(**BASE))
    requests = [Generate(f"r{number}", prompt, NEW_TOKENS, GREEDY) for number, prompt in enumerate(PROMPTS)]
    found = bench.run(requests, stagger=1)
    assert bench.preemptions > 0
    assert sum(one.last.prompt_cached for one in found if one.last is not None) > 0


@pytest.mark.parametrize(("first", "second"), [_pair(*pair) for pair in PAIRS])
def test_a_pair_works_or_is_refused(
    first: str,
    second: str,
    source: Path,
    expected: Callable[[tuple[str, ...], Path], list[list[int]]],
    tmp_path: Path,
) -> None:
    """Refused: by both names. Else exact but for what the lossy ones of the pair do."""
    try:
        engine = EngineConfig(**settings((first, second), tmp_path))
    except ValidationError as error:
        missing = [name for name in (first, second) if name not in str(error)]
        if missing:
            pytest.fail(f"refused without naming {missing}: {error}")
        return
    lossy = tuple(name for name in (first, second) if name not in EXACT)
    assert crowd(source, engine) == expected(lossy, tmp_path)
