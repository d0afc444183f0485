"""Memory that runs out in a step costs the youngest request of it, on every runner, and the worker goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.model.harness import GREEDY, Bench
from workers.config import EngineConfig
from workers.model.native.decoder import NativeDecoder
from workers.model.runner import TorchRunner
from workers.protocol import Generate

REQUESTS = [Generate(f"r{index}", [50 + 9 * index + place for place in range(20)], 10, GREEDY) for index in range(3)]
RUNNERS: dict[str, tuple[type, str, type[Exception]]] = {
    "native": (NativeDecoder, "forward", MemoryError),
    "batched": (TorchRunner, "_forward", torch.OutOfMemoryError),
}


@pytest.mark.parametrize("attention", RUNNERS)
def test_the_youngest_of_the_step_ends_and_the_others_are_what_they_were(
    attention: str, smollm2_cut: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has written keys and values already when it fails: the worst place."""
    engine = EngineConfig.model_validate(
        {"device": "cpu", "dtype": "float32", "attention": attention, "blocks": 32, "threads": 1}
    )
    calm = Bench(smollm2_cut, engine)
    expected = [one.tokens for one in calm.run(REQUESTS)]
    bench = Bench(smollm2_cut, engine)
    owner, name, error = RUNNERS[attention]
    real: Callable[..., Any] = getattr(owner, name)
    faults = iter([error("out of memory")])

    def forward(*arguments: Any, **named: Any) -> Any:
        found = real(*arguments, **named)
        if len(bench.engine.planner.roster.running) == len(REQUESTS) and (fault := next(faults, None)) is not None:
            raise fault
        return found

    monkeypatch.setattr(owner, name, forward)
    ended = bench.run(REQUESTS, stagger=2)
    assert next(faults, None) is None, "it was injected"
    assert [one.last.finish for one in ended if one.last is not None] == ["length", "length", "error"]
    assert ended[2].last is not None
    assert ended[2].last.error == "overloaded"
    assert [one.tokens for one in ended[:2]] == expected[:2]
    assert [one.tokens for one in bench.run([Generate("after", REQUESTS[2].tokens, 10, GREEDY)])] == expected[2:]
