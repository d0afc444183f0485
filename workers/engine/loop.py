"""The engine: a thread that steps the planner and the runner, and a mailbox in front of it.

Rules
- The engine thread owns planner, pool, sequences and runner. Others only ``submit`` messages.
- Nothing to do: the thread sleeps in its mailbox, and reports its figures once a second. After the first such second
  it does what can wait (``spare``), until there is a message.
- One ``on_outputs`` per step. Callbacks run on the engine thread; they must be quick and must not raise.
- A runner that raises costs the requests it concerns, never the worker: out of memory the youngest request of the
  step, ``SequenceFault`` those it names, anything else all of the step. They are not tried again, so no request can
  poison the worker twice. ``MAX_FAILURES`` steps failed in a row, each with all its requests, or ``RunnerGoneError``:
  the device is lost, ``on_fatal`` is called, the loop ends. A failure of some is not the device's: the others go on.
- Every sequence gets its last output exactly once, also when the engine stops.
- A request with a grammar waits in ``compiling.py`` until it is compiled elsewhere; what its tokens allow next is
  worked out elsewhere too, while the next step runs (``constraint.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue

from msgspec.structs import replace as with_fields

from workers.config import EngineConfig
from workers.engine.adapters import AdapterTable, Install, Remove
from workers.engine.compiling import Compiling, Pending, Ready
from workers.engine.constraint import Grammars
from workers.engine.device_time import DeviceTime
from workers.engine.handover import Handover, Transferred
from workers.engine.leases import BlockMover, Offer
from workers.engine.outputs import last_output
from workers.engine.plan import Runner, RunnerGoneError, SequenceFault, StepPlan, StepResult
from workers.engine.planner import Planner
from workers.engine.purge import Receipts
from workers.engine.record import SequenceRecord, StepRecord
from workers.engine.sequence import Sequence
from workers.engine.tier_desk import TierDesk, TierReport, TierStore, new_tiers
from workers.protocol import Cancel, Drain, Generate, Prefetch, Purge, Purged, SequenceOutput, StepOutputs, WorkerStats

IDLE_REPORT_S = 1.0
MAX_FAILURES = 3
_MEMORY_MARKS = ("out of memory", "can't allocate memory", "not enough memory")

Message = Generate | Cancel | Purge | Drain | Ready | Install | Remove | TierReport | Prefetch | Transferred
_log = logging.getLogger(__name__)


class RunnerLostError(RuntimeError):
    """The runner failed too many steps in a row, or says that it is gone; the last failure is its cause."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a runner's exception says that memory ran out, on whatever device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _MEMORY_MARKS)


class Engine:
    """One model on one device.

    ``on_outputs(StepOutputs)``: news of a step, or of none (idle report: ``step`` 0). ``on_purged(Purged)``: once when
    a purge's cached blocks are zeroed, and again with ``pending`` 0 and the full count when the last one in use was.
    ``on_step(StepRecord)`` and ``on_record(SequenceRecord)``: figures for telemetry. ``on_drained()``: after ``Drain``,
    when the last request has ended. ``on_fatal(error)``: the loop has ended; without it the error ends the thread.
    ``grammars``: without it, requests with one are refused (``bad_request``); ``adapters``: likewise (``adapter``).
    ``store``: the bytes of the tiers below the device; the runner moves blocks between both.
    ``mover``, ``on_offer``: see ``handover.py``.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        blocks: int,
        max_context: int,
        revision: str,
        eos_ids: Iterable[int],
        on_outputs: Callable[[StepOutputs], None],
        clock_ns: Callable[[], int] = time.time_ns,
        vocab_size: int | None = None,
        on_purged: Callable[[Purged], None] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        on_record: Callable[[SequenceRecord], None] | None = None,
        on_drained: Callable[[], None] | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        max_failures: int = MAX_FAILURES,
        grammars: Grammars | None = None,
        adapters: AdapterTable | None = None,
        store: TierStore | None = None,
        mover: BlockMover | None = None,
        on_offer: Callable[[str, Offer | None], None] = lambda ticket, offer: None,
        windows: tuple[int, ...] = (0,),
        twice_at: int = 0,
        spare: Callable[[], bool] = lambda: False,
    ) -> None:
        """``windows``: of the model's block tables (``tables.py``). ``twice_at``: of its work (``allowance.py``).
        ``spare``: does a bit of what can wait, some milliseconds of it; says whether there is more."""
        tiers = None if store is None else new_tiers(config, store)
        self.planner = Planner(
            config,
            blocks=blocks,
            max_context=max_context,
            revision=revision,
            eos_ids=eos_ids,
            vocab_size=vocab_size,
            records=on_record is not None,
            tiers=tiers,
            windows=windows,
            twice_at=twice_at,
        )
        self._tiers = None if tiers is None or store is None else TierDesk(tiers, store, self.submit)
        self._runner = runner
        self._clock = clock_ns
        self._spare = spare
        self._on_outputs = on_outputs
        self._on_step = on_step
        self._on_record = on_record
        self._on_drained = on_drained
        self._on_fatal = on_fatal
        self._max_failures = max_failures
        self._grammars = grammars
        self._adapters = adapters if adapters is not None else AdapterTable()
        self._compiling = Compiling()
        self._handover = Handover(self.planner.pool, mover, config, revision, runner.zero_blocks, on_offer)
        self._mail: SimpleQueue[Message | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._news: list[SequenceOutput] = []
        self._receipts = Receipts(on_purged)
        self._failures = 0
        self._step_ms = 0.0
        self._device = DeviceTime()
        self._draining = False
        self._drained = False
        self._stopping = False

    def submit(self, message: Message) -> None:
        """Hand a message to the engine thread; from any thread, never blocks."""
        self._mail.put(message)

    def start(self) -> None:
        """Start the engine thread. Raises RuntimeError when it runs already."""
        if self._thread is not None:
            raise RuntimeError("the engine thread runs already")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End the loop after the step under way; what is unfinished ends with ``error="draining"``.

        Raises TimeoutError when a step does not return within ``timeout`` seconds.
        """
        self._mail.put(None)
        thread = self._thread
        if thread is None:
            self._read_mail()
            self._close()
            return
        if thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise TimeoutError(f"the engine's step did not return within {timeout:g} s")
        self._thread = None

    def _run(self) -> None:
        self._device.begin(self._clock())
        try:
            while not self._stopping:
                if not self.step() and not self._stopping:
                    self._sleep()
            self._close()
        except BaseException as error:
            if self._on_fatal is None:
                raise
            _log.exception("the engine loop ended")
            self._on_fatal(error)

    def _sleep(self) -> None:
        try:
            message = self._mail.get(timeout=IDLE_REPORT_S)
            self._device.idle(self._clock())
            self._handle(message)
        except Empty:
            self._device.idle(self._clock())
            self._on_outputs(StepOutputs(0, [], self._stats(0.0)))
            while self._mail.empty() and self._spare():
                pass

    def step(self) -> bool:
        """Read the mailbox, run one step, report it. False when there was nothing to compute.

        The thread calls it; tests and the simulator may, instead of ``start``. Raises RunnerLostError.
        """
        self._read_mail()
        planner = self.planner
        started = self._clock()
        self._device.begin(started)
        self._handover.sweep(started)
        plan = planner.plan(started)
        if self._tiers is not None:
            self._device.moving("offload", self._tiers.carry_out, self._clock)
        if plan is None:
            self._report(planner.step + 1)
            return False
        before = self._clock()
        try:
            if plan.runs:
                result = self._runner.run(plan)
            else:
                self._runner.zero_blocks(plan.zero)
                result = StepResult([])
            after = self._clock()
            if self._tiers is not None:
                self._device.moved("offload", self._tiers.ran(plan, after - before))
            self._device.step(plan, after)
            outputs = planner.commit(plan, result, after)
        except Exception as error:
            outputs = self._failed(plan, error)
            after = self._clock()
            self._device.failed(plan, after)
        else:
            self._failures = 0
            if self._grammars is not None:
                self._advance(self._grammars, plan)
        self._news.extend(outputs)
        self._step_ms = (after - started) / 1e6
        self._report(plan.step)
        if self._on_step is not None and plan.chunks:
            pool = planner.pool
            self._on_step(StepRecord.of(plan, self._clock(), after - before, pool.used / pool.total))
        return True

    @staticmethod
    def _advance(grammars: Grammars, plan: StepPlan) -> None:
        """Have it worked out what may follow the tokens just booked."""
        constrained = [
            sampler
            for chunk in plan.chunks
            for sampler in chunk.samplers
            if sampler.constraint is not None and sampler.finish is None
        ]
        if constrained:
            grammars.advance(constrained)

    def _failed(self, plan: StepPlan, error: Exception) -> list[SequenceOutput]:
        """Fail whom it concerns. Raises RunnerLostError when the runner keeps failing."""
        if isinstance(error, RunnerGoneError):
            raise RunnerLostError(str(error)) from error
        if is_out_of_memory(error):
            youngest = max(plan.chunks, key=lambda chunk: chunk.sequence.arrival, default=None)
            ids, code = ([youngest.sequence.id] if youngest else []), "overloaded"
        elif isinstance(error, SequenceFault):
            ids, code = [sequence.id for sequence in error.sequences], "internal"
        else:
            ids, code = [chunk.sequence.id for chunk in plan.chunks], "internal"
        spared = {chunk.sequence.id for chunk in plan.chunks} - set(ids)
        self._failures += not (ids and spared)
        _log.error("step %d failed (%s); requests failed: %d", plan.step, type(error).__name__, len(set(ids)))
        if self._failures >= self._max_failures:
            raise RunnerLostError(f"{self._failures} steps failed in a row") from error
        outputs = self.planner.fail(plan, ids, code, self._clock())
        if plan.zero:
            # Nothing of the failed plan was booked, so whoever took these blocks has not written to them for good.
            self._runner.zero_blocks(plan.zero)
        return outputs

    def _report(self, step: int) -> None:
        """Send what is new. News without a plan get a step number of their own."""
        planner = self.planner
        if self._on_record is not None:
            for record in planner.take_records():
                self._on_record(record)
        if self._news or step == planner.step:
            planner.step = step
            now, told = self._clock(), self._handover.told
            news, self._news = [self._device.told(told(output, now)) for output in self._news], []
            self._on_outputs(StepOutputs(step, news, self._stats(self._step_ms)))
        if len(self._receipts) and not planner.pool.dirty:
            self._receipts.settle(self._clock())
        self._adapters.sweep(planner.roster.requests, self._compiling)
        busy = len(planner) or len(self._compiling) or self._handover.leases
        if self._draining and not self._drained and not busy:
            self._drained = True
            if self._on_drained is not None:
                self._on_drained()

    def _stats(self, step_ms: float) -> WorkerStats:
        stats, kinds = self.planner.stats(step_ms), self._device.due()
        return with_fields(stats, device_ns=kinds) if kinds else stats

    def _read_mail(self) -> None:
        mail = self._mail
        while not mail.empty():
            self._handle(mail.get())

    def _handle(self, message: Message | None) -> None:
        if isinstance(message, Generate):
            self._generate(message)
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, Ready):
            self._ready(message)
        elif isinstance(message, Purge):
            self._purge(message)
        elif isinstance(message, Drain):
            self._draining = True
        elif isinstance(message, Install | Remove):
            self._adapters.handle(message)
        elif isinstance(message, Transferred):
            generate = self._device.moving("transfer", partial(self._handover.handle, message), self._clock)
            if generate is not None:
                self._generate(generate)
        elif message is None:
            self._stopping = True
        elif self._tiers is not None:
            self._device.moving("offload", partial(self._tiers.handle, message), self._clock)

    def _generate(self, message: Generate) -> None:
        if message.id in self.planner or message.id in self._compiling:
            _log.error("a request with an id that is running already was dropped")
            return
        self._handover.expect(message)
        now = self._clock()
        if self._draining:
            self._refuse(Pending(message, now), "draining")
        elif message.adapter is not None and message.adapter not in self._adapters:
            self._refuse(Pending(message, now), "adapter")
        elif not message.grammar:
            self._add(Pending(message, now))
        elif self._grammars is None:
            self._refuse(Pending(message, now), "bad_request")
        else:
            self._compiling.add(message, now)
            name, mail = message.id, self._mail
            self._grammars.compile(message.grammar, message.n, lambda constraints: mail.put(Ready(name, constraints)))

    def _add(self, pending: Pending) -> list[Sequence]:
        """Give a request to the planner; its sequences, of which those it cannot run are reported already."""
        sequences = self.planner.add(pending.generate, pending.received_ns)
        for sequence in sequences:
            if sequence.finish is not None:
                self._news.append(last_output(sequence, [], []))
        return sequences

    def _refuse(self, pending: Pending, error: str) -> None:
        self._add(pending)
        self._news.extend(self.planner.refuse(pending.generate.id, error, self._clock()))

    def _ready(self, message: Ready) -> None:
        """A grammar was compiled, or was not."""
        pending = self._compiling.take(message.id)
        if pending is None:
            return
        if message.constraints is None:
            self._refuse(pending, "grammar")
            return
        # Numbers of choices that no engine takes are refused by the planner: then there are none to give them to.
        for sequence, constraint in zip(self._add(pending), message.constraints, strict=False):
            sequence.constraint = constraint
        for cancel in pending.cancels:
            self._cancel(cancel)

    def _cancel(self, message: Cancel) -> None:
        pending = self._compiling.cancel(message)
        if pending is not None:
            self._add(pending)
        self._news.extend(self.planner.cancel(message.id, self._clock(), message.index))

    def _purge(self, message: Purge) -> None:
        self._handover.purge(message)
        ticket = self.planner.purge(message.scopes, message.labels, message.keys)
        dirty = self.planner.take_dirty()
        if dirty:
            self._runner.zero_blocks(dirty)
        if self._tiers is not None and ticket.below is not None:
            self._tiers.carry_out()
            self._tiers.purged(ticket.below)
        self._receipts.add(message.id, ticket, self._clock())

    def _close(self) -> None:
        """The last outputs of whatever is unfinished."""
        now = self._clock()
        for pending in self._compiling.take_all():
            self._add(pending)
        for request_id in list(self.planner.roster.requests):
            self._news.extend(self.planner.refuse(request_id, "draining", now))
        self._report(self.planner.step + 1)
        if self._tiers is not None:
            self._tiers.close()
