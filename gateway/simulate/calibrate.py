"""Times a model's steps on this machine and fits the simulator's step time to them.

Rules
- The real engine over the real runner, stepped by the caller: a step's time is all of it, planning and bookkeeping too.
- Steps of many shapes: lone and many decodes, prompts alone and beside decodes, short and long contexts. The first
  round warms up and is not counted.
- The relative error counts, so that short steps matter as much as long ones, and its sum, not its squares: steps during
  which another process took the processor pull it nowhere. No figure is negative.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from workers.config import EngineConfig
    from workers.engine.plan import Runner, StepPlan, StepResult
    from workers.model.loading import LoadedModel

NAMES = ("base", "per_decode", "per_prefill_token", "per_context_token")
BATCHES = (1, 2, 4, 8, 16)
PROMPTS = (16, 64, 160)
OUTPUT = 24
_ROUNDS = 30
_CLOSE = 1e-3
"""Errors below it weigh alike."""
Floats = NDArray[np.float64]

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: what it computed and how long it took."""

    decodes: int
    prefill: int
    attended: int
    seconds: float

    @classmethod
    def of(cls, plan: StepPlan, seconds: float) -> Sample:
        """From the step's plan."""
        decodes = sum(chunk.is_decode for chunk in plan.chunks)
        attended = sum(chunk.count * chunk.start + chunk.count * (chunk.count + 1) // 2 for chunk in plan.chunks)
        return cls(decodes, plan.tokens - decodes, attended, seconds)


class Watched:
    """A runner that remembers its last plan."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plan: StepPlan | None = None

    def take(self) -> StepPlan | None:
        """The plan that ran since the last call, if any."""
        plan, self._plan = self._plan, None
        return plan

    def run(self, plan: StepPlan) -> StepResult:
        """As the runner does."""
        self._plan = plan
        return self._runner.run(plan)

    def zero_blocks(self, blocks: list[int]) -> None:
        """As the runner does."""
        self._runner.zero_blocks(blocks)


def calibrate(model: str, *, say: Say = lambda line: None, config: EngineConfig | None = None) -> dict[str, Any]:
    """Load ``model``, time it, fit. Raises ModelStoreError, ValueError."""
    from workers.config import EngineConfig
    from workers.model.loading import load

    config = config or EngineConfig(max_step_tokens=256, max_running=max(BATCHES), prefix_cache=False)
    say(f"Loading {model} …")
    loaded = load(model, config)
    say("Timing its steps …")
    samples = measure(loaded, config)
    found = fit(samples)
    figures = {name: float(f"{value * 1e3:.6g}") for name, value in zip(NAMES, found, strict=True)}
    return {
        "step_ms": {**figures, "twice_at": loaded.twice_at},
        "error_percent": round(100 * error(samples, found), 2),
        "samples": len(samples),
        "model": model,
        "device": loaded.device,
        "dtype": loaded.dtype,
        "attention": loaded.attention,
        "machine": platform.machine(),
    }


def measure(loaded: LoadedModel, config: EngineConfig, *, rounds: int = 3) -> list[Sample]:
    """Run many shapes of steps; the samples of all rounds but the first."""
    from workers.engine.loop import Engine
    from workers.protocol import Generate, SamplingParams

    runner = Watched(loaded.runner)
    engine = Engine(
        config,
        runner,
        blocks=loaded.blocks,
        max_context=loaded.max_context,
        revision=loaded.revision,
        eos_ids=loaded.eos_ids,
        on_outputs=lambda outputs: None,
        vocab_size=loaded.vocab_size,
        windows=loaded.windows,
        twice_at=loaded.twice_at,
    )
    rng = Random(1)  # noqa: S311 - token ids to time, no secret
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    samples: list[Sample] = []
    number = 0
    for turn in range(rounds + 1):
        for batch in BATCHES:
            for prompt in PROMPTS:
                for _ in range(batch):
                    number += 1
                    tokens = [rng.randrange(loaded.vocab_size) for _ in range(prompt)]
                    engine.submit(Generate(str(number), tokens, OUTPUT, params))
                steps = _drain(engine.step, runner)
                if turn:
                    samples.extend(steps)
    engine.stop()
    return samples


def _drain(step: Callable[[], bool], runner: Watched) -> list[Sample]:
    samples = []
    while True:
        began = time.perf_counter()
        busy = step()
        took = time.perf_counter() - began
        plan = runner.take()
        if plan is not None:
            samples.append(Sample.of(plan, took))
        if not busy:
            return samples


def fit(samples: list[Sample]) -> list[float]:
    """Seconds per step, decode, prompt token and attended position. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no step was timed")
    rows = _features(samples) / np.array([sample.seconds for sample in samples])[:, None]
    use = list(range(len(NAMES)))
    found = np.zeros(len(NAMES))
    while use:
        solution = _least_absolute(rows[:, use])
        if (solution >= 0).all():
            found[use] = solution
            break
        # What comes out negative costs nothing that can be told from the rest.
        use = [name for name, value in zip(use, solution, strict=True) if value >= 0]
    return [float(value) for value in found]


def error(samples: list[Sample], found: list[float]) -> float:
    """The relative error that half of the steps do not exceed."""
    seconds = np.array([sample.seconds for sample in samples])
    return float(np.median(np.abs(_features(samples) @ np.array(found) / seconds - 1)))


def _least_absolute(rows: Floats) -> Floats:
    """``rows`` · x ≈ 1 with the least sum of absolute errors, by least squares with weights 1 / |error|, repeated."""
    ones = np.ones(len(rows))
    weights = ones
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        solution = np.linalg.lstsq(rows * root[:, None], root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(rows @ solution - 1), _CLOSE)
    return np.asarray(solution)


def _features(samples: list[Sample]) -> Floats:
    return np.array([[1, s.decodes, s.prefill, s.attended] for s in samples], dtype=np.float64)
