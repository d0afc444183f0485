"""Every pair of the engine's switches works together or is refused at start, under each of their settings.

Works: greedy tokens of a crowd with shared prefixes, in a pool so small that sequences are preempted, are those of the
same model with the pair's lossy switches only (an exact switch changes no token), and no block is lost. Only where sums
are made in another order before keys and values are rounded may a near tie fall to the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, count
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.workers.model import adapters, tiny
from tests.workers.model.harness import GREEDY, Bench, Finished
from workers.config import EngineConfig
from workers.model.draft import DraftRunner
from workers.protocol import Generate
from workers.techniques import SWITCHES

pytestmark = pytest.mark.usefixtures("ranks_as_threads")

SMALL: Mapping[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
"""A tiny model that the kernel can run as well."""


def guesser(folder: Path) -> Path:
    """A draft model that is right now and then: the model itself with other numbers in a few places."""
    made = tiny.model(**SMALL)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.005)
    return tiny.write_directory(made, folder / "small")


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
    "expert_parallel": lambda folder: {"expert_parallel": True, "tensor_parallel": 2},
    "tiers": lambda folder: {
        "tiers": [
            {"kind": "host", "size": "64KiB"},
            {"kind": "disk", "path": str(folder / "kv"), "size": "1MiB"},
        ]
    },
}
"""The smallest setting of each switch that turns it on. ``folder`` may hold what it names; it is the pair's own."""
OTHERS: Mapping[str, Callable[[Path], Mapping[str, Any]]] = {
    "attention reference": lambda folder: {"attention": "reference"},
    "kv_dtype fp8": lambda folder: {"kv_dtype": "fp8"},
    "speculation draft": lambda folder: {"speculation": {"method": "draft", "draft_model": str(guesser(folder))}},
    "role prefill": lambda folder: {"role": "prefill"},
    "weight_dtype int8": lambda folder: {"weight_dtype": "int8"},
    "tiers host": lambda folder: {"tiers": [{"kind": "host", "size": "64KiB"}]},
}
"""Further settings of the same switches, which are other code: the switch's name comes first."""
EVERY = {**EXAMPLES, **OTHERS}
BASE: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": 16, "blocks": 11}
EXACT = {switch.field for switch in SWITCHES if switch.exact}
SPREAD = {"tensor_parallel", "pipeline_parallel", "expert_parallel"}
"""They start processes."""
SPREAD_OFTEN = {"prefix_cache", "max_chunk_tokens", "kv_dtype", "speculation", "tiers"}
"""With these and with each other the first two are run every time, the rest in the long suite. Experts on two devices
run every time in ``parallel/test_spread.py``."""


def switch_of(example: str) -> str:
    """The field that an example turns on."""
    return example.split()[0]


def _pair(first: str, second: str) -> Any:
    pair = {switch_of(first), switch_of(second)}
    often = not pair & SPREAD or {first, second} <= SPREAD_OFTEN | SPREAD - {"expert_parallel"}
    return pytest.param(first, second, id=f"{first}-{second}", marks=() if often else pytest.mark.long)


PAIRS = [_pair(first, second) for first, second in combinations(EVERY, 2) if switch_of(first) != switch_of(second)]


PROMPTS = [[*range(40, 73), 100 + own, 7, 9 + own] for own in range(4)] + [
    [5, 5, 6, 5, 5, 6, 5, 5],
    list(range(90, 107)),
]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_directory(tiny.model(**SMALL), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with experts, for the switch that is about them."""
    made = tiny.model(0, "mixtral", **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return tiny.write_directory(made, tmp_path_factory.mktemp("mixture"))


OTHER_SUMS = {"attention", "tensor_parallel", "pipeline_parallel", "expert_parallel"}
"""They add in another order: a number between two that int8 or fp8 can hold may be rounded to the other one."""
NEAR = 0.1
"""Natural logarithm: what rounding a few keys or values otherwise may do to a token's probability here."""


def crowd(source: Path, engine: EngineConfig) -> list[list[int]]:
    """The tokens of every prompt (see ``answers``)."""
    return [one.tokens for one in answers(source, engine)]


def answers(source: Path, engine: EngineConfig) -> list[Finished]:
    """Of every prompt, all at once; the first comes a second time, when its prefix may be cached.

    By its clocks rows and guesses cost next to nothing, so that guesses are made whenever there is one.
    """
    bench = Bench(source, engine)
    bench.engine._clock = count(step=1000).__next__
    if isinstance(bench.model.runner, DraftRunner):
        bench.model.runner._clock = count().__next__
    requests = [Generate(f"r{number}", prompt, NEW_TOKENS, GREEDY) for number, prompt in enumerate(PROMPTS)]
    found = bench.run(requests, stagger=1) + bench.run([Generate("again", PROMPTS[0], NEW_TOKENS, GREEDY)])
    pool = bench.engine.planner.pool
    assert pool.used == 0
    stats = bench.engine.planner.stats()
    assert (stats.drafts_accepted + stats.drafts_rejected > 0) == (engine.speculation is not None)
    if bench.model.ranks is not None:
        bench.model.ranks.close()
    return found


def same_but_for_near_ties(found: Finished, wanted: Finished) -> bool:
    """The same tokens up to a place where both choices were as likely; log probabilities close as far as that."""
    pairs = zip(found.tokens, wanted.tokens, found.logprobs, wanted.logprobs, strict=True)
    for ours, theirs, mine, other in pairs:
        if abs(mine - other) > NEAR:
            return False
        if ours != theirs:
            break
    return True


def settings(names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    return {**BASE, **{key: value for name in names for key, value in EVERY[name](folder).items()}}


Expected = Callable[[Path, tuple[str, ...], Path], list[Finished]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """What the lossy switches give by themselves; computed once for each model and set of them."""
    known: dict[tuple[Path, tuple[str, ...]], list[Finished]] = {}

    def look_up(source: Path, lossy: tuple[str, ...], folder: Path) -> list[Finished]:
        if (source, lossy) not in known:
            known[source, lossy] = answers(source, EngineConfig(**{**settings(lossy, folder), "blocks": 256}))
        return known[source, lossy]

    return look_up


def test_every_switch_has_an_example_that_turns_it_on(tmp_path: Path) -> None:
    """And nothing else has one."""
    assert set(EXAMPLES) == {switch.field for switch in SWITCHES}
    for name in EVERY:
        config = EngineConfig(**settings((name,), tmp_path))
        switch = switch_of(name)
        assert getattr(config, switch) != EngineConfig.model_fields[switch].default


def test_the_crowd_preempts_and_hits(source: Path) -> None:
    """Or the matrix would show little."""
    bench = Bench(source, EngineConfig(**BASE))
    requests = [Generate(f"r{number}", prompt, NEW_TOKENS, GREEDY) for number, prompt in enumerate(PROMPTS)]
    found = bench.run(requests, stagger=1)
    assert bench.preemptions > 0
    assert sum(one.last.prompt_cached for one in found if one.last is not None) > 0


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_pair_works_or_is_refused(
    first: str, second: str, source: Path, mixture: Path, expected: Expected, tmp_path: Path
) -> None:
    """Refused: by what each of them sets. Else exact but for what the lossy ones of the pair do."""
    pair = (first, second)
    try:
        engine = EngineConfig(**settings(pair, tmp_path))
    except ValidationError as error:
        missing = [name for name in pair if not any(field in str(error) for field in EVERY[name](tmp_path))]
        if missing:
            pytest.fail(f"refused without naming {missing}: {error}")
        return
    lossy = tuple(name for name in pair if switch_of(name) not in EXACT)
    model = mixture if "expert_parallel" in pair else source
    found, wanted = answers(model, engine), expected(model, lossy, tmp_path)
    switches = set(map(switch_of, pair))
    if "kv_dtype" in switches and switches & OTHER_SUMS:
        assert all(map(same_but_for_near_ties, found, wanted))
    else:
        assert [one.tokens for one in found] == [one.tokens for one in wanted]
