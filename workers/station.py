"""A worker at work: the stream, the engine and its figures, tied together. No torch: the runner is handed in.

Rules
- The stream's messages go straight into the engine's mailbox; what the engine says goes straight into the stream's
  outbox. Nothing here waits for either.
- The port is open before the model is loaded; ``serve`` makes Hello come.
- A drain ends by itself: no new work, running work finishes, the unsent is sent, the stream ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace as with_fields

from workers.adapter_desk import AdapterDesk, told
from workers.adapters import LoadedAdapter
from workers.config import EngineConfig
from workers.engine.adapters import AdapterTable
from workers.engine.constraint import Grammars
from workers.engine.leases import BlockMover
from workers.engine.loop import Engine
from workers.engine.plan import Runner
from workers.engine.record import SequenceRecord, StepRecord, TransferRecord
from workers.engine.tier_desk import TierStore
from workers.log import get
from workers.metrics import Sources, WorkerMetrics
from workers.protocol import (
    PROTOCOL,
    Down,
    Drain,
    DropAdapter,
    Hello,
    Keep,
    LoadAdapter,
    StepOutputs,
    WorkerStats,
)
from workers.rpc import TlsFiles, WorkerServer
from workers.tracing import HOLD_PREFILL_S, HOLD_S, WorkerTelemetry
from workers.tracing import setup as setup_tracing
from workers.transfer.desk import TransferDesk
from workers.transfer.stream import handler

log = get("worker")

SWEEP_S = 1.0
ENGINE_STOP_S = 5.0


class Ranks(Protocol):
    """Processes that compute together, this one among them."""

    @property
    def alive(self) -> int:
        """How many run."""
        ...

    def watch(self, lost: Callable[[], None]) -> None:
        """Have ``lost`` called, from any thread, when one ends that should not."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to run, and what is told about it."""

    runner: Runner
    blocks: int
    max_context: int
    revision: str
    tokenizer_sha256: str
    eos_ids: frozenset[int]
    vocab_size: int | None = None
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    versions: Mapping[str, str] = field(default_factory=dict)
    windows: tuple[int, ...] = (0,)
    """Of the block tables that a sequence has; 0 = keeps all."""
    twice_at: int = 0
    """At so many tokens of context a prompt's token takes twice as long as at the start; 0: all take equally long."""
    spare: Callable[[], bool] = lambda: False
    """Does a bit of what can wait until nothing else is to do; whether there is more of it."""
    memory: Callable[[], Mapping[str, int]] = dict
    """Bytes by kind, for the metrics."""
    ranks: Ranks | None = None
    """The other processes that it is divided among."""
    compiled: Callable[[], int] = lambda: 0
    """Kernels compiled since it was loaded."""
    store: TierStore | None = None
    """The tiers below the device."""
    grammars: Grammars | None = None
    """Compiles grammars for its vocabulary; None: requests with one are refused."""
    adapters: AdapterTable | None = None
    """Those that are loaded; None: it takes none."""
    read_adapter: Callable[[str, str], LoadedAdapter] | None = None
    """(name, source) → one that ``adapters`` may install. Any thread. Raises AdapterError."""
    mover: BlockMover | None = None
    """Takes blocks out of its cache and puts others in; None: they stay where they are."""
    layout: str = ""
    """What the bytes of its blocks depend on (``Hello.layout``)."""

    def described(self) -> dict[str, str]:
        """Versions and what runs on what, as far as known: for the info metric and the resource of every span."""
        told = {
            **self.versions,
            "model_revision": self.revision,
            "tokenizer_sha256": self.tokenizer_sha256,
            "device": self.device,
            "dtype": self.dtype,
        }
        return {name: value for name, value in told.items() if value}


class Station:
    """One worker. Belongs to the event loop, but for the callbacks that the engine thread makes."""

    def __init__(
        self,
        address: str,
        *,
        secret: str | None,
        tls: TlsFiles | None = None,
        name: str,
        model: str,
        config: EngineConfig,
        metrics_host: str = "127.0.0.1",
        metrics_port: int = 0,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises ValueError where the port would be open to anybody."""
        self._transfers = TransferDesk(config, tls)
        blocks = handler(self._transfers.parts) if config.role == "prefill" else None
        self.server = WorkerServer(address, self._deliver, secret=secret, tls=tls, blocks=blocks)
        self.name = name
        self.model = model
        self.drained = asyncio.Event()
        """Set when a drain (asked for by ``drain`` or by the gateway) is over."""
        self.failed = asyncio.Event()
        """Set when the engine is lost."""
        self._config = config
        self._metrics_address = (metrics_host, metrics_port)
        self._env = env
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine | None = None
        self._grammars: Grammars | None = None
        self._adapters: AdapterDesk | None = None
        self._table = AdapterTable()
        self._hello: Hello | None = None
        self._stats = WorkerStats()
        self._transfer_counts: dict[str, tuple[int, float]] = {}
        """As ``WorkerStats`` has them; replaced, never changed: the engine thread reads it."""
        self._metrics: WorkerMetrics | None = None
        self._stop_metrics: Callable[[], None] | None = None
        self._tracing: WorkerTelemetry | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen; gateways wait for their Hello. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        await self.server.start()

    def serve(self, model: ServedModel) -> Hello:
        """Start the engine and greet. Returns what was said. Raises ValueError for a wrong ``OTEL_*`` variable."""
        runs = model.described()
        ranks = model.ranks
        self._table = table = model.adapters if model.adapters is not None else AdapterTable()
        self._metrics = WorkerMetrics(
            Sources(
                lambda: self._stats,
                self._evictions,
                model.memory,
                model.kv_bytes_per_token,
                adapters=lambda: (len(table), table.bytes) if model.adapters is not None else None,
                ranks=(lambda: 1) if ranks is None else (lambda: ranks.alive),
                compiled=model.compiled,
            ),
            versions=runs,
        )
        self._tracing = setup_tracing(
            model=self.model,
            worker=self.name,
            metrics=self._metrics,
            versions=runs,
            env=self._env,
            hold_s=HOLD_PREFILL_S if self._config.role == "prefill" else HOLD_S,
        )
        port, self._stop_metrics = self._metrics.serve(*self._metrics_address)
        self._engine = Engine(
            self._config,
            model.runner,
            blocks=model.blocks,
            max_context=model.max_context,
            revision=model.revision,
            eos_ids=model.eos_ids,
            vocab_size=model.vocab_size,
            on_outputs=self._publish,
            on_purged=self.server.purged,
            on_step=self._step,
            on_record=self._record,
            on_drained=self._from_engine(self.drained.set),
            on_fatal=lambda error: self._from_engine(self.failed.set)(),
            grammars=model.grammars,
            adapters=table,
            store=model.store,
            mover=model.mover if self._config.role != "both" else None,
            on_offer=self._transfers.on_offer,
            windows=model.windows,
            twice_at=model.twice_at,
            spare=model.spare,
        )
        self._adapters = AdapterDesk(
            model.read_adapter, self._engine.submit, self.server.purged, self._from_engine(self._tell_adapters)
        )
        self._grammars = model.grammars
        if ranks is not None:
            ranks.watch(self._from_engine(self.failed.set))
        self._transfers.open(model.mover, model.layout, model.revision, self._engine.submit, self._transferred)
        self._engine.start()
        self._sweeper = asyncio.create_task(self._sweep())
        hello = self._hello = Hello(
            protocol=PROTOCOL,
            worker=self.name,
            model=self.model,
            model_revision=model.revision,
            tokenizer_sha256=model.tokenizer_sha256,
            block_size=self._config.block_size,
            blocks=model.blocks,
            max_running=self._engine.planner.roster.slots.limit,
            max_context=model.max_context,
            pid=os.getpid(),
            metrics_port=port,
            device=model.device,
            dtype=model.dtype,
            weight_bytes=model.weight_bytes,
            kv_bytes_per_token=model.kv_bytes_per_token,
            keeps=self._engine.planner.limits.tables.keeps,
            versions=dict(model.versions),
            adapters=[told(adapter) for adapter in table],
            ranks=1 if ranks is None else ranks.alive,
            role=self._config.role,
            address=self.server.blocks_address,
            layout=model.layout if self._config.role != "both" else "",
            transfer_min_tokens=self._config.transfer.min_tokens,
        )
        self.server.ready(hello)
        return hello

    async def drain(self, timeout_s: float) -> bool:
        """Finish what runs, refuse what comes. False when ``timeout_s`` was not enough."""
        if self._engine is None:
            return True
        self._transfers.before(Drain())
        self._engine.submit(Drain())
        try:
            async with asyncio.timeout(timeout_s):
                await self.drained.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Send what is unsent, end the stream, the engine and the ports."""
        await self.server.end_session(2.0)
        await self.server.stop()
        await self._transfers.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        desk = self._adapters.close if self._adapters is not None else None
        for stop in (
            desk,
            self._stop_engine,
            self._stop_metrics,
            self._tracing.shutdown if self._tracing else None,
        ):
            if stop is not None:
                await asyncio.to_thread(stop)

    def _deliver(self, message: Down) -> None:
        if isinstance(message, Keep):
            if self._tracing is not None:
                self._tracing.keep(message.id, message.keep)
        elif isinstance(message, LoadAdapter | DropAdapter):
            if self._adapters is not None:
                self._adapters.take(message)
        elif self._engine is not None and not self._transfers.takes(message):
            self._transfers.before(message)
            self._engine.submit(message)

    def _tell_adapters(self) -> None:
        """A gateway that connects from now on hears of those that are loaded now."""
        if self._hello is not None:
            self._hello = with_fields(self._hello, adapters=[told(adapter) for adapter in self._table])
            self.server.renew(self._hello)

    def _publish(self, outputs: StepOutputs) -> None:
        if self._transfer_counts:
            outputs = with_fields(outputs, stats=with_fields(outputs.stats, transfers=self._transfer_counts))
        self._stats = outputs.stats
        self.server.publish(outputs)

    def _transferred(self, record: TransferRecord) -> None:
        if self._metrics is not None and self._tracing is not None:
            self._metrics.transferred(record.result, record.seconds)
            self._tracing.transferred(record)
        count, seconds = self._transfer_counts.get(record.result, (0, 0.0))
        self._transfer_counts = {**self._transfer_counts, record.result: (count + 1, seconds + record.seconds)}

    def _evictions(self) -> Mapping[str, int]:
        return {} if self._engine is None else dict(self._engine.planner.pool.evictions)

    def _step(self, record: StepRecord) -> None:
        if self._metrics is not None and self._tracing is not None:
            self._metrics.step(record)
            self._tracing.step(record)

    def _record(self, record: SequenceRecord) -> None:
        if self._tracing is not None:
            self._tracing.record(record)

    def _from_engine(self, call: Callable[[], None]) -> Callable[[], None]:
        """``call``, made on the event loop from the engine thread."""

        def make() -> None:
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                    self._loop.call_soon_threadsafe(call)

        return make

    def _stop_engine(self) -> None:
        if self._engine is not None:
            try:
                self._engine.stop(ENGINE_STOP_S)
            except TimeoutError:
                log.warning("engine_did_not_stop", after_s=ENGINE_STOP_S)
        if self._grammars is not None:
            self._grammars.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._tracing is not None:
                self._tracing.sweep()
