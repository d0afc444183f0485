"""The tiers under a real model: tokens as without them, bytes back where they were, on the kernel and in torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench, Finished
from workers.config import EngineConfig
from workers.engine.tier_rates import Rates
from workers.protocol import Generate, Purge, Purged, TierStats

BLOCK = 16
PROMPT = [3 + (7 * place) % 200 for place in range(90)]
SMALL = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": BLOCK, "blocks": 12}


class Always(Rates):
    """Bringing back pays, whatever this machine is busy with."""

    def pays(self, tier: str, blocks: int, *, queued: int = 0, tokens: int | None = None) -> bool:
        return True


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.model(hidden_size=64, intermediate_size=64, head_dim=16)
    return tiny.write_directory(made, tmp_path_factory.mktemp("tiny"))


def bench(source: Path, *, host: str = "", disk: Path | None = None, **config: Any) -> Bench:
    tiers: list[dict[str, Any]] = [{"kind": "host", "size": host}] if host else []
    if disk is not None:
        tiers.append({"kind": "disk", "path": str(disk), "size": "4MiB"})
    made = Bench(source, EngineConfig(**{**SMALL, **config, "tiers": tiers}))
    if made.engine.planner.tiers is not None:
        made.engine.planner.tiers.rates = Always(BLOCK)
    return made


def ask(one: Bench, name: str, prompt: list[int] = PROMPT, tokens: int = 6, **fields: Any) -> Finished:
    [found] = one.run([Generate(name, prompt, tokens, GREEDY, **{"scope": b"mine", **fields})])
    return found


def flood(one: Bench, name: str) -> None:
    ask(one, name, [200 + (place + len(name) + ord(name[-1])) % 90 for place in range(160)], 2, scope=name.encode())


def cached(found: Finished) -> int:
    assert found.last is not None
    return found.last.prompt_cached


def told(one: Bench, tier: str) -> TierStats:
    return one.engine.planner.stats().tiers[tier]


def settle(one: Bench) -> None:
    """Until the disk has done what it was asked."""
    tiers = one.engine.planner.tiers
    assert tiers is not None
    assert tiers.disk is not None
    deadline = time.monotonic() + 30
    while (tiers.disk.scanning or tiers.disk.pool.used) and time.monotonic() < deadline:
        one.engine.step()
        time.sleep(0.002)


@pytest.mark.parametrize("attention", ["native", "batched"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_host_and_disk_give_the_tokens_of_no_tier_at_all(
    source: Path, tmp_path: Path, attention: str, kv_dtype: str
) -> None:
    """An evicted prefix comes back from host memory, later from a file, at last after a restart."""
    kind = {"attention": attention, "kv_dtype": kv_dtype}
    plain = bench(source, **kind)
    expected = ask(plain, "first")
    flood(plain, "x")
    assert cached(ask(plain, "again")) < 80
    host_only = bench(source, host="1MiB", **kind)
    ask(host_only, "first")
    flood(host_only, "x")
    found = ask(host_only, "again")
    assert found.tokens == expected.tokens
    assert cached(found) == 80
    assert told(host_only, "host").restored_blocks > 0
    sixteen_blocks = {"auto": "128KiB", "int8": "36KiB"}[kv_dtype]
    small = {"host": sixteen_blocks, "disk": tmp_path / "kv", **kind}
    both = bench(source, **small)
    ask(both, "first")
    for number in range(6):
        flood(both, f"x{number}")
    settle(both)
    found = ask(both, "again")
    assert found.tokens == expected.tokens
    assert told(both, "disk").hit_tokens > 0
    for number in range(6):
        flood(both, f"y{number}")
    settle(both)
    both.engine.stop()
    later = bench(source, **small)
    assert cached(ask(later, "new", [9] * 40)) == 0
    settle(later)
    found = ask(later, "after a restart")
    later.engine.stop()
    assert found.tokens == expected.tokens
    assert cached(found) == 80
    assert told(later, "disk").hit_tokens == 80


@pytest.mark.parametrize("attention", ["native", "batched"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_swapped_sequences_go_on_where_they_were(source: Path, attention: str, prefix_cache: bool) -> None:
    """Four that outgrow the pool: the tokens of one at a time; what came back was not computed again."""
    requests = [Generate(f"r{number}", PROMPT[number : 44 - 2 * number], 50, GREEDY) for number in range(4)]
    alone = bench(source, attention=attention, blocks=64)
    expected = [alone.run([one])[0].tokens for one in requests]
    outcomes: dict[str, int] = {}
    for host in ("", "1MiB"):
        crowd = bench(source, host=host, attention=attention, prefix_cache=prefix_cache, blocks=12)
        assert [found.tokens for found in crowd.run(requests)] == expected
        assert crowd.preemptions > 0
        outcomes[host] = crowd.engine.planner.roster.recomputed
    tiers = crowd.engine.planner.tiers
    assert tiers is not None
    assert tiers.swaps > 0
    assert outcomes["1MiB"] == 0 < outcomes[""]


def test_a_purge_zeroes_host_memory_and_removes_files(source: Path, tmp_path: Path) -> None:
    """The receipt counts each tier, and says so when the last file is gone."""
    one = bench(source, host="128KiB", disk=tmp_path / "kv")
    answers: list[Purged] = []
    one.engine._receipts._tell = answers.append
    ask(one, "first")
    for number in range(4):
        flood(one, f"x{number}")
    settle(one)  # else a slow disk still writes what comes back, and it would be computed instead
    ask(one, "again", PROMPT[:40])
    settle(one)
    store = one.model.store
    assert store is not None
    before = len(list(tmp_path.rglob("*.kv")))
    tiers = one.engine.planner.tiers
    assert tiers is not None
    slots = [slot for slot in range(store.slots) if tiers.host.holding(slot).scope == b"mine"]
    assert slots
    assert any(any(store.host.read(slot)) for slot in slots)
    one.engine.submit(Purge("p", [b"mine"]))
    deadline = time.monotonic() + 30
    while not answers and time.monotonic() < deadline:
        one.engine.step()
        time.sleep(0.002)
    [answer] = answers
    assert answer.pending == 0
    assert answer.tiers["host"] == len(slots)
    assert answer.tiers["disk"] == before - len(list(tmp_path.rglob("*.kv"))) > 0
    assert not any(any(store.host.read(slot)) for slot in slots)
    assert cached(ask(one, "once more")) == 0
    one.engine.stop()


def test_a_failed_step_leaves_nothing_wrong_below(source: Path) -> None:
    """The runner raises in a step that saves and restores: what it was to save is not believed to be there."""
    one = bench(source, host="1MiB")
    expected = ask(one, "first").tokens
    flood(one, "x")
    run, failing = one.noted.run, [True]

    def once(plan: Any) -> Any:
        if plan.restores and failing:
            failing.clear()
            raise RuntimeError("injected")
        return run(plan)

    one.noted.run = once  # type: ignore[method-assign]
    failed = ask(one, "fails")
    assert failed.last is not None
    assert failed.last.finish == "error"
    assert not failing
    assert ask(one, "again").tokens == expected


def test_a_tier_that_cannot_be_is_refused_at_the_start(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.tiers\[0\]\.size=1024 holds 0 blocks of \d+ bytes"):
        bench(source, host="1KiB")
    with pytest.raises(ValueError, match=r"engine\.tiers\[1\]\.size=10 holds no block"):
        Bench(
            source,
            EngineConfig(
                **SMALL,
                tiers=[{"kind": "host", "size": "1MiB"}, {"kind": "disk", "path": str(tmp_path), "size": 10}],
            ),
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"engine\.tiers\[1\]\.path: path '.*file' of the tier of kind disk: .*file is no folder"
    ):
        bench(source, host="1MiB", disk=tmp_path / "file")
