"""Our engine, in this process, under the pump: the real ``Engine`` over the real runner, stepped by the caller."""

from __future__ import annotations

import resource
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.bench import load, metrics, pump
from gateway.bench.load import Load, Request, Timeline
from gateway.bench.pump import News
from gateway.bench.report import BenchError, engine_versions

if TYPE_CHECKING:
    from workers.config import EngineConfig
    from workers.engine.plan import Runner
    from workers.engine.planner import Planner
    from workers.engine.record import StepRecord
    from workers.model.loading import LoadedModel
    from workers.protocol import SequenceOutput, StepOutputs

IDLE_S = 0.0002
"""How long a step that had nothing to compute waits."""
LEAST_REQUESTS = 8
"""A run has so many requests at least: whole waves of its concurrency."""


@dataclass(slots=True)
class Steps:
    """Totals over a run's engine steps."""

    count: int = 0
    rows: int = 0
    """Tokens that went through the linears."""
    adapter_rows: int = 0
    """Of those the ones with an adapter."""
    total_ns: int = 0
    run_ns: int = 0
    """Of that, inside the runner; the rest is planning and bookkeeping."""
    most_ns: int = 0

    def figures(self) -> dict[str, Any]:
        """Under the names that reports use."""
        overhead = self.total_ns - self.run_ns
        return {
            "steps": self.count,
            "rows": self.rows,
            "step_max_ms": round(self.most_ns / 1e6, 3),
            "bookkeeping_ms_per_step": round(overhead / self.count / 1e6, 4) if self.count else None,
            "bookkeeping_share": round(overhead / self.total_ns, 5) if self.total_ns else None,
        }


@dataclass(frozen=True, slots=True)
class Held:
    """What a search holds after a step."""

    beams: int
    blocks: int
    """In use."""
    spared: int
    """How many more they were if every beam had its own."""
    answers: list[list[int]]
    """Best first; none before the last step."""


class BenchEngine:
    """A ``pump.StepEngine``. Answers are greedy where nothing else is said, and end tokens do not stop them."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        source: str = "",
        load_s: float = 0.0,
        temperature: float = 0.0,
    ) -> None:
        """``temperature``: of the answers; each is seeded by its request's id."""
        self.loaded, self.config, self.source, self.load_s = loaded, config, source, load_s
        self._temperature = temperature
        self._build(loaded.runner)

    def _build(self, runner: Runner) -> None:
        from workers.engine.loop import Engine

        self._engine = Engine(
            self.config,
            runner,
            blocks=self.loaded.blocks,
            max_context=self.loaded.max_context,
            revision=self.loaded.revision,
            eos_ids=self.loaded.eos_ids,
            vocab_size=self.loaded.vocab_size,
            clock_ns=time.perf_counter_ns,
            on_outputs=self._take,
            on_step=self._count,
            windows=self.loaded.windows,
            twice_at=self.loaded.twice_at,
            adapters=self.loaded.adapters,
            store=self.loaded.store,
        )
        self._news: list[News] = []
        self._open: dict[str, int] = {}
        self.steps = Steps()

    @property
    def vocab(self) -> int:
        """Token ids are below it."""
        return self.loaded.vocab_size

    @property
    def preemptions(self) -> int:
        """Since the engine was made."""
        return self._engine.planner.roster.preemptions

    @property
    def planner(self) -> Planner:
        """To read, between steps."""
        return self._engine.planner

    def settle(self, timeout_s: float = 60.0) -> None:
        """Step until the tiers have nothing to write or read any more. Raises BenchError when they do not end."""
        tiers = self._engine.planner.tiers
        end = time.monotonic() + timeout_s
        while tiers is not None and tiers.disk is not None and (tiers.disk.busy or tiers.disk.writing):
            if time.monotonic() > end:
                raise BenchError(f"the disk tier still writes or reads after {timeout_s:g} s")
            self.step()

    def submit(self, request: Request) -> None:
        """Hand it to the engine."""
        from workers.protocol import Generate, SamplingParams

        seed = zlib.crc32(request.id.encode()) if self._temperature else None
        params = SamplingParams(temperature=self._temperature, seed=seed, ignore_eos=True)
        self._open[request.id] = request.n
        self._engine.submit(
            Generate(
                request.id,
                list(request.tokens),
                request.max_tokens,
                params,
                n=request.n,
                scope=b"bench",
                tenant_key="bench",
                adapter=request.adapter,
            )
        )

    def step(self) -> list[News]:
        """One step of the engine; what it brought."""
        if not self._engine.step():
            time.sleep(IDLE_S)  # a disk is being read, by a thread that needs the processor
        news, self._news = self._news, []
        return news

    def run(self, work: Load, progress: pump.Progress = lambda done, total: None) -> list[Timeline]:
        """Run a load; ``steps`` then tells of its steps. Raises BenchError when a request can never run here."""
        self.check(work)
        self.steps = Steps()
        return pump.run(self, work, progress)

    def search(self, prompt: Sequence[int], width: int, length: int) -> Iterator[Held]:
        """A beam search; after every step what is held. Raises BenchError when the engine refuses it."""
        from workers.protocol import Beams, Generate, SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True)
        name, pool = f"search-{id(prompt)}", self._engine.planner.pool
        self._open[name] = width
        self._engine.submit(Generate(name, list(prompt), length, params, n=width, beams=Beams(width), scope=b"bench"))
        answers: list[list[int]] = []
        while name in self._open:
            for news in self.step():
                if news.error is not None:
                    raise BenchError(f"the engine refused a search of {width} beams: {news.error}")
                answers += [list(news.tokens)] if news.tokens else []
            yield Held(len(self._engine.planner.roster.running), pool.used, pool.spared, answers)

    def check(self, work: Load) -> None:
        """Raises BenchError for a load that does not fit the context or the cache."""
        if work.longest > self.loaded.max_context:
            raise BenchError(
                f"a request of {work.longest} tokens exceeds the model's context of {self.loaded.max_context}; "
                "ask for less input or output"
            )
        room = self.loaded.blocks * self.loaded.block_size
        if work.longest > room:
            raise BenchError(
                f"a request of {work.longest} tokens exceeds the KV cache of {room}; raise engine.kv_cache"
            )

    def close(self) -> None:
        """End it with its ranks and tiers; whatever is unfinished ends with an error."""
        self._engine.stop()
        if self.loaded.ranks is not None:
            self.loaded.ranks.close()

    def _take(self, outputs: StepOutputs) -> None:
        self._news += map(self._of, outputs.outputs)

    def _of(self, output: SequenceOutput) -> News:
        ended = output.finish is not None
        if ended:
            self._open[output.id] -= 1
        finished = ended and not self._open[output.id]
        if finished:
            del self._open[output.id]
        timings = output.timings
        return News(
            output.id,
            output.tokens,
            finished,
            cached=output.prompt_cached if output.index == 0 else None,
            scheduled=timings.scheduled_ns / 1e9 if timings is not None and timings.scheduled_ns else None,
            error=(output.error or "internal") if output.finish == "error" else None,
        )

    def _count(self, record: StepRecord) -> None:
        steps = self.steps
        taken = record.end_ns - record.start_ns
        steps.count += 1
        steps.rows += record.prefill_tokens + record.decode_tokens
        steps.adapter_rows += record.adapter_tokens
        steps.total_ns += taken
        steps.run_ns += record.run_ns
        steps.most_ns = max(steps.most_ns, taken)

    def versions(self) -> dict[str, Any]:
        """For the report."""
        return engine_versions(self.loaded, self.config, self.source)

    def sizes(self) -> dict[str, Any]:
        """Cold start and memory."""
        loaded = self.loaded
        kv = loaded.blocks * loaded.block_size * loaded.kv_bytes_per_token
        return {
            "load_s": round(self.load_s, 3),
            "weight_bytes": loaded.weight_bytes,
            "kv_bytes": kv,
            "peak_rss_bytes": peak_rss(),
        }


def open_engine(
    source: str,
    config: EngineConfig,
    *,
    base_dir: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    temperature: float = 0.0,
) -> BenchEngine:
    """Load a model (seconds), and do what a worker does before its first request. Raises BenchError with the
    loader's message."""
    from workers.model.loading import load as load_model
    from workers.model.memory import touching

    begin = time.perf_counter()
    try:
        loaded = load_model(source, config, base_dir=base_dir or Path.cwd(), progress=progress)
    except ValueError as error:
        raise BenchError(str(error)) from None
    took = time.perf_counter() - begin
    touch = touching(loaded.runner)
    while touch():
        pass
    return BenchEngine(loaded, config, source=source, load_s=took, temperature=temperature)


def measure(
    engine: BenchEngine,
    label: str,
    *,
    input_tokens: int,
    output_tokens: int,
    concurrency: int,
    requests: int | None = None,
    slo: metrics.Slo | None = None,
    warm_up: bool = True,
    progress: pump.Progress = lambda done, total: None,
) -> dict[str, Any]:
    """One run of equal requests in a closed loop; its figures. ``label`` names its prompts: use one only once.

    A warm-up of as many, short ones comes first.
    """
    count = requests or waves(concurrency)
    work = load.uniform(label, count, input_tokens, output_tokens, engine.vocab, concurrency)
    engine.check(work)
    if warm_up:
        short = min(input_tokens, 32)
        engine.run(load.uniform(f"{label}-warm", concurrency, short, 4, engine.vocab, concurrency))
    before = engine.preemptions
    lines = engine.run(work, progress)
    return {
        "concurrency": concurrency,
        "input": input_tokens,
        "output": output_tokens,
        **metrics.summarise(lines, slo),
        "preemptions": engine.preemptions - before,
        **engine.steps.figures(),
    }


def waves(concurrency: int) -> int:
    """Requests of a run: whole waves, ``LEAST_REQUESTS`` at least."""
    return concurrency * max(1, -(-LEAST_REQUESTS // concurrency))


def peak_rss() -> int:
    """Most memory this process ever held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def overridden(config: EngineConfig, assignments: Iterable[str]) -> EngineConfig:
    """``config`` with ``key=value`` settings, values as in YAML. Raises BenchError naming what is wrong."""
    import yaml
    from pydantic import ValidationError

    from workers.config import EngineConfig as Model

    changes: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise BenchError(f"--set {text!r}: write key=value, for instance max_running=64")
        changes[key.strip()] = yaml.safe_load(value)
    return _validated(Model, {**config.model_dump(), **changes}, ValidationError)


def _validated(model: type[EngineConfig], values: Mapping[str, Any], failure: type[Exception]) -> EngineConfig:
    try:
        return model.model_validate(dict(values))
    except failure as error:
        details = error.errors() if hasattr(error, "errors") else []
        text = "; ".join(f"engine.{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details)
        raise BenchError(text) from None
