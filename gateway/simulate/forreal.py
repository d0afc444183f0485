"""A scenario for real: the same gateway side (``front.py``) with real engines over a real model, by the wall clock.

Rules
- Nothing is shared with the simulation but the scenario and the ``Front``: what comes out is what the simulator has to
  foretell. Engines run in threads of their own, as in a worker; their news come through one queue.
- Answers are as long as the scenario says: end tokens do not stop them.
- Prompts must not have prefixes: their token ids would lie outside a real vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as with_fields

from gateway.simulate.calibrate import NAMES, error, fit, measure
from gateway.simulate.figures import Figures
from gateway.simulate.front import Front
from gateway.simulate.scenario import StepCost
from gateway.simulate.scenario_file import LoadedScenario
from gateway.simulate.simulation import Run, simulate
from gateway.simulate.workload import Workload
from gateway.worker_handle import WorkerHandle
from workers.config import EngineConfig
from workers.protocol import PROTOCOL, Down, Generate, Hello, SamplingParams, StepOutputs

if TYPE_CHECKING:
    from workers.engine.loop import Engine
    from workers.model.loading import LoadedModel

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_LONGEST_NAP_S = 0.25


class RealWorker:
    """An engine in a thread. A ``gateway.worker_handle.Link``."""

    def __init__(self, engine: Engine, front: Front, handle: WorkerHandle, hello: Hello) -> None:
        self.engine = engine
        self.handle = handle
        self._front = front
        handle.opened(self, hello)

    def send(self, message: Down) -> None:
        """To the engine; a request produces exactly what its scenario says."""
        if isinstance(message, Generate):
            self.engine.submit(with_fields(message, params=_GREEDY, max_tokens=self._front.answer(message.id)))

    def flush(self) -> None:
        """It has been sent."""


def engine_config(loaded: LoadedScenario) -> EngineConfig:
    """The scenario's workers as a real engine's configuration. Raises ValueError for one that cannot run for real."""
    config = loaded.scenario.workers
    if any(tenant.prefix is not None for tenant in loaded.scenario.tenants):
        raise ValueError("tenants[].prefix: a scenario with prefixes cannot run for real; remove them")
    if config.count != 1:
        raise ValueError(f"workers.count: {config.count} engines would share this machine; for real there is 1")
    return EngineConfig(
        block_size=config.block_size,
        blocks=max(2, config.blocks),
        max_step_tokens=config.max_step_tokens,
        max_chunk_tokens=config.max_chunk_tokens,
        max_running=config.max_running,
        prefix_cache=config.prefix_cache,
        mode=config.mode,
    )


def run_for_real(loaded: LoadedScenario, model: LoadedModel) -> Run:
    """Run the scenario in real time. Takes ``duration_s`` seconds, and the rest of what runs where it drains."""
    from workers.engine.loop import Engine

    scenario = loaded.scenario
    config = engine_config(loaded)
    news: SimpleQueue[StepOutputs] = SimpleQueue()
    began = time.monotonic()

    def clock() -> float:
        return time.monotonic() - began

    workload = Workload(scenario, loaded.base_dir)
    front = Front(loaded, workload)
    steps = 0
    engine = Engine(
        config,
        model.runner,
        blocks=model.blocks,
        max_context=model.max_context,
        revision=model.revision,
        eos_ids=model.eos_ids,
        vocab_size=model.vocab_size,
        on_outputs=news.put,
        windows=model.windows,
        twice_at=model.twice_at,
    )
    handle = WorkerHandle("worker-0", model="real", pool="real", labels={}, incarnation=1, clock=clock)
    hello = Hello(
        PROTOCOL,
        "worker-0",
        "real",
        model.revision,
        "",
        model.block_size,
        model.blocks,
        scenario.workers.max_running,
        model.max_context,
        keeps=engine.planner.limits.tables.keeps,
    )
    RealWorker(engine, front, handle, hello)
    front.join(handle)
    requests = workload.requests()
    coming = next(requests, None)
    count = 0
    engine.start()
    try:
        while True:
            now = clock()
            if now >= scenario.duration_s and not (scenario.drain and front.busy):
                break
            changed = False
            while coming is not None and coming.at <= now:
                front.arrive(coming, now)
                count += 1
                coming = next(requests, None)
                changed = True
            while (outputs := _take(news, 0.0 if changed else _nap(coming.at if coming else None, now))) is not None:
                steps += outputs.step > 0
                now = clock()
                front.report(handle, outputs, now)
                changed = True
            front.turn(now)
            front.ledger.mark(now)
    finally:
        engine.stop()
    elapsed = clock()
    front.ledger.close(elapsed)
    return Run(
        scenario,
        front.ledger,
        elapsed_s=elapsed,
        wall_s=elapsed,
        requests=count,
        preemptions=engine.planner.roster.preemptions,
        steps=steps,
        busy_s=0.0,
        unfinished=len(front.queue) + front.queue.running,
    )


def compare(loaded: LoadedScenario, source: str) -> dict[str, Any]:
    """Time the model, simulate with what was found, run for real; the figures side by side.

    Raises ModelStoreError, ValueError.
    """
    from workers.model.loading import load

    config = engine_config(loaded)
    model = load(source, config)
    samples = measure(model, config)
    found = fit(samples)
    # The engine cuts chunks by the model's shape, not by what its steps were seen to take.
    cost = StepCost(**{name: value * 1e3 for name, value in zip(NAMES, found, strict=True)}, twice_at=model.twice_at)
    workers = loaded.scenario.workers.model_copy(update={"step_ms": cost})
    calibrated = replace(loaded, scenario=loaded.scenario.model_copy(update={"workers": workers}))
    real = Figures.of(run_for_real(calibrated, model)).as_json()
    simulated = Figures.of(simulate(calibrated)).as_json()
    return {
        "step_ms": cost.model_dump(exclude={"calibration"}),
        "calibration_error_percent": round(100 * error(samples, found), 2),
        "real": real,
        "simulated": simulated,
        "difference": {
            tenant: {
                "ttft_p50": _relative(simulated["tenants"][tenant]["ttft_p50_s"], row["ttft_p50_s"]),
                "share": round(simulated["tenants"][tenant]["share"] - row["share"], 4),
            }
            for tenant, row in real["tenants"].items()
        },
        "throughput_difference": _relative(simulated["throughput_tokens_s"], real["throughput_tokens_s"]),
    }


def _take(news: SimpleQueue[StepOutputs], wait_s: float) -> StepOutputs | None:
    try:
        return news.get(timeout=wait_s) if wait_s > 0 else news.get_nowait()
    except Empty:
        return None


def _nap(next_arrival: float | None, now: float) -> float:
    """How long to wait for news before something else is due."""
    return _LONGEST_NAP_S if next_arrival is None else min(_LONGEST_NAP_S, max(0.0, next_arrival - now))


def _relative(simulated: float | None, real: float | None) -> float | None:
    return None if simulated is None or not real else round(simulated / real - 1, 4)
