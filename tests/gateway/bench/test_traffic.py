"""Tenants, lengths, arrivals and replays: what was asked for is what is sent."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from gateway.bench import traffic
from gateway.bench.report import BenchError
from gateway.bench.traffic import Prompts, Tenant

A, B, C = Tenant("a", "ka", 4), Tenant("b", "kb", 2), Tenant("c", "kc", 1)
IDS = Prompts(5000)


def test_tenants_from_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "from the environment")
    made = traffic.tenants(["search=s3cret", "plain-key", "batch=env:SOME_KEY"], [4, 2, 1])
    assert [(t.name, t.key, t.share) for t in made] == [
        ("search", "s3cret", 4),
        ("tenant2", "plain-key", 2),
        ("batch", "from the environment", 1),
    ]
    assert "s3cret" not in repr(made)
    assert traffic.tenants([], []) == [Tenant("default", "")]


@pytest.mark.parametrize(
    ("keys", "shares", "message"),
    [
        (["a", "b"], [1.0], "1 figures for 2 keys"),
        (["a"], [0.0], "above 0"),
        (["x=1", "x=2"], [], "same name"),
        (["env:NO_SUCH_VARIABLE_HERE"], [], "NO_SUCH_VARIABLE_HERE is not set"),
    ],
)
def test_tenants_refused(keys: list[str], shares: list[float], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        traffic.tenants(keys, shares)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("512", 512, 512), ("8-32", 8, 32), ("lognormal:64:0.5:100", 1, 100)]
)
def test_lengths(text: str, low: int, high: int) -> None:
    draw = traffic.lengths(text, "--input").sampler(Random(1))
    drawn = [draw() for _ in range(500)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert low == high or len(set(drawn)) > 10


@pytest.mark.parametrize("text", ["", "x", "0", "32-8", "5-", "lognormal:1:2", "lognormal:-1:1:5", "gamma:1"])
def test_lengths_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--input"):
        traffic.lengths(text, "--input")


def test_shots_are_dealt_by_share_and_share_no_prompt() -> None:
    fixed = traffic.lengths("20", "--input")
    shots = traffic.synthetic("l", 70, (A, B, C), IDS, fixed, traffic.lengths("4-9", "--output"), None)
    assert [sum(shot.tenant == index for shot in shots) for index in range(3)] == [40, 20, 10]
    assert len({shot.prompt[:8] for shot in shots}) == 70
    assert all(shot.at is None and 4 <= shot.max_tokens <= 9 for shot in shots)
    timed = traffic.synthetic("l", 70, (A,), IDS, fixed, fixed, 10.0)
    times = [shot.at for shot in timed if shot.at is not None]
    assert times == sorted(times)
    assert len(times) == 70


def test_text_prompts_are_words() -> None:
    text = Prompts(5000, as_text=True).make("x", 12)
    assert isinstance(text, str)
    assert set(text.split()) <= set(traffic.WORDS)
    assert len(text.split()) == 12


def test_slots_follow_the_shares_and_leave_nobody_out() -> None:
    assert traffic.slots(7, (A, B, C)) == [4, 2, 1]
    assert traffic.slots(3, (A, B, C)) == [1, 1, 1]
    assert sum(traffic.slots(64, (A, B, C))) == 64
    with pytest.raises(BenchError, match="below the number of tenants"):
        traffic.slots(2, (A, B, C))


def test_a_log_is_played_again(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(
        "arrival,tenant,prompt,output,prefix,prefix_tokens\n"
        "0,b,30,5,sys,16\n4,other,30,6,sys,16\n2,a,40,7,,0\n6,other,12,1,,0\n"
    )
    shots = traffic.replayed(log, "l", (A, B), IDS, speed=2)
    assert [(shot.at, shot.max_tokens, shot.input_tokens) for shot in shots] == [
        (0, 5, 30),
        (1, 7, 40),
        (2, 6, 30),
        (3, 1, 12),
    ]
    assert [shot.tenant for shot in shots] == [1, 0, 0, 0]
    first, _, third, _ = shots
    assert first.prompt[:16] == third.prompt[:16]
    assert first.prompt[16:] != third.prompt[16:]
    assert [len(shot.prompt) for shot in shots] == [30, 40, 30, 12]


def test_a_log_that_cannot_be_played(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(BenchError, match="holds no request"):
        traffic.replayed(empty, "l", (A,), IDS, 1)
    with pytest.raises(BenchError, match="cannot be read"):
        traffic.replayed(tmp_path / "none.csv", "l", (A,), IDS, 1)
    with pytest.raises(BenchError, match="--speed"):
        traffic.replayed(empty, "l", (A,), IDS, 0)
