"""Grammars are tried out in a child that can be killed: its answers, its end, and what is remembered."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway import grammar_check
from gateway.errors import ApiError
from gateway.grammar_check import GrammarCheck, GrammarRefusedError
from gateway.grammars import json_text
from tests.workers import tiny_model

FAKE = """
import json, os, sys, time
for line in sys.stdin:
    grammar = json.loads(line)["grammar"]
    print("loaded", flush=True)
    if grammar == "hang":
        time.sleep(3600)
    if grammar.startswith("once ") and not os.path.exists(seen := grammar.removeprefix("once ")):
        open(seen, "w").close()
        time.sleep(3600)
    if grammar == "die":
        os.kill(os.getpid(), 9)
    print(json.dumps({"error": None if grammar.startswith(("good", "once ")) else f"{os.getpid()}"}), flush=True)
"""
HERE = Path(".")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("checked"))


@pytest.fixture
async def real() -> AsyncIterator[GrammarCheck]:
    made = GrammarCheck()
    yield made
    await made.close()


@pytest.fixture
async def fake() -> AsyncIterator[GrammarCheck]:
    made = GrammarCheck(compile_s=0.5, command=(sys.executable, "-c", FAKE))
    yield made
    await made.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_good_and_bad_grammars_with_the_real_compiler(real: GrammarCheck, model: Path) -> None:
    await real.check(json_text({"type": "object"}), model, "acme")
    for _ in range(2):
        with pytest.raises(GrammarRefusedError, match="Invalid type: nope"):
            await real.check(json_text({"type": "nope"}), model, "acme")
    await asyncio.gather(*(real.check(json_text({"const": i}), model, f"t{i % 3}") for i in range(12)))
    assert 1 <= len(real._idle) <= grammar_check.CHILDREN


async def test_a_model_that_cannot_be_read_is_no_crash(real: GrammarCheck, tmp_path: Path) -> None:
    with pytest.raises(GrammarRefusedError, match="vocabulary"):
        await real.check(json_text({"type": "object"}), tmp_path, "acme")


async def test_one_that_takes_too_long_is_refused_and_its_child_killed(fake: GrammarCheck) -> None:
    with pytest.raises(GrammarRefusedError, match=r"longer than 0\.5 s"):
        await fake.check("hang", HERE, "acme")
    assert fake._idle == []
    await fake.check("good", HERE, "acme")
    with pytest.raises(GrammarRefusedError, match="longer"):
        async with asyncio.timeout(0.1):  # from memory
            await fake.check("hang", HERE, "other")


async def test_one_that_took_too_long_is_tried_again_later(
    fake: GrammarCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that stood still for a second had a good schema refused until the gateway ended."""
    monkeypatch.setattr(grammar_check, "OVERRUN_S", 0)
    with pytest.raises(GrammarRefusedError, match="longer"):
        await fake.check(f"once {tmp_path / 'seen'}", HERE, "acme")
    await fake.check(f"once {tmp_path / 'seen'}", HERE, "acme")


async def test_one_that_kills_its_child_is_refused(fake: GrammarCheck) -> None:
    with pytest.raises(GrammarRefusedError, match="memory"):
        await fake.check("die", HERE, "acme")
    await fake.check("good", HERE, "acme")


async def test_a_caller_that_leaves_takes_its_child_along(fake: GrammarCheck) -> None:
    """A child in the middle of a question never answers the next one."""
    with pytest.raises(GrammarRefusedError) as error:
        await fake.check("who", HERE, "acme")
    first = int(str(error.value))
    asking = asyncio.create_task(fake.check("hang", HERE, "acme"))
    while fake._idle:
        await asyncio.sleep(0.005)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not alive(first)
    with pytest.raises(GrammarRefusedError) as error:
        await fake.check("who now", HERE, "acme")
    assert int(str(error.value)) != first


async def test_a_tenants_slow_grammars_do_not_take_all_children(fake: GrammarCheck) -> None:
    slow = [asyncio.create_task(fake.check(f"{'hang'}", Path(str(i)), "greedy")) for i in range(4)]
    await asyncio.sleep(0.05)
    await fake.check("good", HERE, "patient")
    assert not all(task.done() for task in slow)
    ends = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(end, GrammarRefusedError) for end in ends)


async def test_what_is_remembered_is_bounded(fake: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """security 41."""
    monkeypatch.setattr(grammar_check, "REMEMBERED", 5)
    for i in range(12):
        with pytest.raises(GrammarRefusedError):
            await fake.check(f"unique {i}", HERE, "acme")
    assert len(fake._known) == 5


async def test_a_child_that_cannot_be_started_is_503() -> None:
    broken = GrammarCheck(command=("/nonexistent/compiler",))
    with pytest.raises(ApiError) as error:
        await broken.check("good", HERE, "acme")
    assert (error.value.status, error.value.code) == (503, "grammar_compiler")
    gone = GrammarCheck(command=(sys.executable, "-c", ""))
    with pytest.raises(ApiError) as error:
        await gone.check("good", HERE, "acme")
    assert error.value.status == 503


async def test_closing_ends_the_children(model: Path) -> None:
    check = GrammarCheck()
    await check.check(json_text({"type": "object"}), model, "acme")
    [child] = check._idle
    await check.close()
    assert not alive(child.pid)
    await check.close()


async def test_a_child_that_died_while_it_was_idle_costs_nobody_anything(model: Path) -> None:
    """As where the machine ran out of memory: the next question starts another."""
    check = GrammarCheck()
    await check.check(json_text({"const": 1}), model, "acme")
    [child] = check._idle
    child.kill()
    await child.wait()
    await check.check(json_text({"const": 2}), model, "acme")
    [other] = check._idle
    assert other.pid != child.pid
    await check.close()
