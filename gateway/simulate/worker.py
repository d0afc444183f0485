"""A worker in virtual time: the engine's planner and block pool; not a model but a function says how long steps take.

Rules
- As in a real worker, what arrives during a step is read before the next one is planned, and the next one is planned
  before the gateway has heard of the last (``workers/engine/loop.py``): so a reaction to a step's news joins the step
  after the next.
- Decode-only steps are advanced together (``workers/engine/stretch.py``) up to the moment somebody looks.
- A prompt that the engine refuses is reported with the next step.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.simulate.clock import Clock
from gateway.simulate.scenario import Workers
from gateway.simulate.step_time import StepTime
from gateway.simulate.workload import MODEL
from gateway.worker_handle import WorkerHandle
from workers.config import EngineConfig
from workers.engine.outputs import last_output
from workers.engine.plan import Sampled, StepPlan, StepResult
from workers.engine.planner import Planner
from workers.engine.sequence import Sequence
from workers.engine.stretch import Stretch
from workers.protocol import PROTOCOL, Down, Generate, Hello, SequenceOutput, StepOutputs

END = 0
"""The end token of an answer that is shorter than its ``max_tokens``."""
MAX_CONTEXT = 1 << 30
_PS_PER_NS = 1000


class SimulatedWorker:
    """One worker; ``handle`` is the gateway's view of it. A ``gateway.worker_handle.Link``."""

    def __init__(
        self,
        name: str,
        config: Workers,
        time: StepTime,
        clock: Clock,
        answer: Callable[[str], int],
        *,
        model: str = MODEL,
        coalesce: bool = True,
    ) -> None:
        """``answer`` says how many tokens a request will produce. ``coalesce`` off: every step is planned (tests)."""
        self.planner = Planner(
            EngineConfig(
                block_size=config.block_size,
                blocks=max(2, config.blocks),
                max_step_tokens=config.max_step_tokens,
                max_chunk_tokens=config.max_chunk_tokens,
                max_running=config.max_running,
                prefix_cache=config.prefix_cache,
                cache_share=config.cache_share,
                mode=config.mode,
                kv_cache_reuse=config.kv_cache_reuse,
            ),
            blocks=config.blocks,
            max_context=MAX_CONTEXT,
            revision=model,
            eos_ids=(END,),
            twice_at=time.twice_at,
        )
        self.handle = WorkerHandle(name, model=model, pool="simulated", labels={}, incarnation=1, clock=clock)
        self.handle.opened(
            self,
            Hello(PROTOCOL, name, model, model, "", config.block_size, config.blocks, config.max_running, MAX_CONTEXT),
        )
        self.due: int | None = None
        """When its step, or its stretch of steps, ends (ps); None while it has nothing to do."""
        self.busy_ps = 0
        self.steps = 0
        self._time = time
        self._coalesce = coalesce
        self._stretch = Stretch(self.planner, left=self._left)
        self._answer = answer
        self._answers: dict[str, int] = {}
        self._mail: list[Generate] = []
        self._refused: list[SequenceOutput] = []
        self._plan: StepPlan | None = None
        self._begun = 0
        self._ahead = 0
        """Steps of the stretch under way that have not been advanced yet."""
        self._closes = False
        """Whether the last of them ends a sequence."""
        self._first = self._growth = 0
        """Picoseconds of the stretch's next step, and by how much each is longer than the one before."""

    def send(self, message: Down) -> None:
        """The gateway's message; read before the next step."""
        if isinstance(message, Generate):
            self._mail.append(message)
            # The stretch ends with the step under way: the next one may be another.
            self.pause(1)

    def flush(self) -> None:
        """It has been sent."""

    @property
    def stretching(self) -> bool:
        """Whether several steps are under way that can be looked into."""
        return self._ahead > 1

    def pause(self, steps: int) -> None:
        """Let a stretch end when ``steps`` more steps than were reported are over: then somebody will look."""
        if 0 < steps < self._ahead:
            self._closes = False
            self._ahead = steps
            self.due = self._begun + steps * self._first + self._growth * (steps * (steps - 1) // 2)

    def start(self, now: int) -> None:
        """Begin a step if there is work and none is under way."""
        if self.due is None and self._mail:
            self._begin(now)

    def catch_up(self, now: int) -> tuple[StepOutputs, int] | None:
        """The news of the stretch's steps that are over by ``now``, but not of its last, and when the latest ended."""
        steps, at = 0, self._begun
        length = self._first
        while steps < self._ahead - 1 and at + length <= now:
            at += length
            length += self._growth
            steps += 1
        return self._advance(steps, at) if steps else None

    def end_step(self) -> StepOutputs:
        """The step that is ``due`` is over: book it, begin the next one, and return the news."""
        now = self.due
        assert now is not None
        planner = self.planner
        if self._closes:
            self._close(now)
        if self._ahead:
            news, _ = self._advance(self._ahead, now)
        else:
            news = StepOutputs(planner.step, self._commit(now), planner.stats())
        self.due = None
        self._begin(now)
        if self._refused:
            refused, self._refused = self._refused, []
            news = StepOutputs(news.step, news.outputs + refused, planner.stats())
        return news

    def idle_report(self) -> StepOutputs:
        """What a worker without work says of itself once a second."""
        return StepOutputs(0, [], self.planner.stats())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _begin(self, now: int) -> None:
        planner = self.planner
        mail, self._mail = self._mail, []
        for message in mail:
            for sequence in planner.add(message, now // _PS_PER_NS):
                if sequence.finish is None:
                    self._answers[sequence.id] = self._answer(sequence.id)
                else:
                    self._refused.append(last_output(sequence, [], []))
        self._begun = now
        if self._coalesce:
            steps, self._closes = self._stretch.length()
            steps += self._closes
            if steps > 1:
                self._ahead = steps
                self._first, self._growth = self._time.stretch(planner.roster.running)
                self.due = now + steps * self._first + self._growth * (steps * (steps - 1) // 2)
                return
        self._closes = False
        plan = planner.plan(now // _PS_PER_NS)
        if plan is None:
            # A refused prompt is news even where nothing runs: its report is a step of no length.
            self.due = now if self._refused else None
            return
        self._plan = plan
        self.due = now + self._time.plan(plan)

    def _close(self, now: int) -> None:
        """All of the stretch but its last step, which is planned: its outputs tell of the others too."""
        if self._ahead > 1:
            self._stretch.advance(self._ahead - 1, self._draw, silent=True)
            self.steps += self._ahead - 1
        self._ahead = 0
        self._closes = False
        self._plan = self.planner.plan(now // _PS_PER_NS)

    def _commit(self, now: int) -> list[SequenceOutput]:
        plan, self._plan = self._plan, None
        if plan is None:
            return []
        result = [Sampled(self._draw(sampler, 1)) for chunk in plan.chunks for sampler in chunk.samplers]
        outputs = self.planner.commit(plan, StepResult(result), now // _PS_PER_NS)
        for output in outputs:
            if output.finish is not None:
                del self._answers[output.id]
        self.steps += 1
        self.busy_ps += now - self._begun
        return outputs

    def _advance(self, steps: int, at: int) -> tuple[StepOutputs, int]:
        outputs = self._stretch.advance(steps, self._draw)
        self.steps += steps
        self.busy_ps += at - self._begun
        self._begun = at
        self._ahead -= steps
        self._first += steps * self._growth
        return StepOutputs(self.planner.step, outputs, self.planner.stats()), at

    def _left(self, sequence: Sequence) -> int:
        return self._answers[sequence.id] - len(sequence.tokens) + sequence.prompt_len

    def _draw(self, sequence: Sequence, count: int) -> list[int]:
        """Tokens of its own; the end token where its answer ends early."""
        token = 1 + (sequence.arrival & 0x3FFFFFFF)
        if count == 1 and self._left(sequence) == 1 and self._answers[sequence.id] < sequence.max_tokens:
            return [END]
        return [token] * count
