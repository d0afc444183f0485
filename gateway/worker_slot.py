"""One place of a pool and the worker in it: start, connect, watch, replace, for as long as the pool lives.

Rules
- One task per slot does everything in turn; a slot has at most one worker at a time.
- A worker is lost when its process ends, its stream breaks, it breaks the protocol, it has work and makes no step for
  ``step_stall_s``, or it says nothing at all for a little longer (idle, it reports once a second). The listener hears
  of it first; then what is left of the process is killed.
- Restarts wait exponentially longer (with jitter, so that many do not start in step); a worker that was ready for
  ``stable_s`` starts the count afresh.
- Only the worker's own end counts here; what single requests came to is the handle's breaker's business.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace as with_fields

from gateway.log import get
from gateway.pool_listener import PoolListener
from gateway.worker_handle import LossKind, WorkerHandle, WorkerLoss, WorkerState
from workers.launchers.base import Launcher, LaunchError, SecuredProcess, WorkerExit, WorkerProcess, WorkerSpec
from workers.protocol import PROTOCOL, AdapterAnswer, Hello, StepOutputs, Up
from workers.rpc import SessionError, WorkerClient

log = get("pool")

_KINDS = {
    "unauthenticated": LossKind.REFUSED,
    "tls": LossKind.REFUSED,
    "aborted": LossKind.REPLACED,
    "protocol": LossKind.PROTOCOL,
    "invalid_argument": LossKind.PROTOCOL,
    "resource_exhausted": LossKind.PROTOCOL,
    "unimplemented": LossKind.PROTOCOL,
}
_LAST_OUTPUTS_S = 0.5
"""After its process ended, how long to read what a worker still sent; and after its stream broke, how long to wait for
the process's exit, which says more."""


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """Seconds, unless said otherwise."""

    step_stall_s: float = 30.0
    silence_slack_s: float = 5.0
    """So much longer than ``step_stall_s`` may an idle worker be silent."""
    start_timeout_s: float = 900.0
    """From launch to Hello: the model may have to be fetched first."""
    backoff_s: float = 0.25
    max_backoff_s: float = 30.0
    stable_s: float = 30.0
    check_s: float = 0.25
    """How often the watchdog looks."""
    stop_grace_s: float = 5.0
    """How long a worker may take to end by itself when the pool stops."""


def backoff_s(failures: int, options: SlotOptions, draw: Callable[[], float]) -> float:
    """Seconds before start number ``failures`` + 1 in a row: doubled each time, capped, times 0.5 … 1."""
    if failures == 0:
        return 0.0
    return float(min(options.max_backoff_s, options.backoff_s * 2 ** min(failures - 1, 30)) * (0.5 + draw() / 2))


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Nothing is left over though this task is cancelled meanwhile; that it was follows then."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


class _WrongWorkerError(Exception):
    """What is wrong with a worker's Hello."""


class WorkerSlot:
    """Keeps one worker alive. ``run`` it as a task; cancelling that stops the worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        launcher: Launcher,
        listener: PoolListener,
        accept: Callable[[Hello], str | None],
        *,
        pool: str,
        labels: Mapping[str, str],
        classes: frozenset[str] = frozenset(),
        options: SlotOptions,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``accept`` says what is wrong with a Hello, or None. ``draw`` gives numbers in [0, 1) for the jitter."""
        self._spec = spec
        self._launcher = launcher
        self._listener = listener
        self._accept = accept
        self._pool = pool
        self._labels = labels
        self._classes = classes
        self._options = options
        self._clock = clock
        self._draw = draw
        self._failures = 0
        self.handle = self._new_handle(1)
        """The current worker."""
        self.last_loss: WorkerLoss | None = None
        """How the last worker in this place ended."""
        self.address: str | None = None
        self.foreign = False
        """Its process is none of ours: it may live on while nobody is connected to it."""

    async def run(self) -> None:
        """Start and replace workers until cancelled."""
        while True:
            began = self._clock()
            loss = await self._live(self.handle)
            self._failures = 1 if self._was_stable(began) else self._failures + 1
            wait_s = backoff_s(self._failures, self._options, self._draw)
            if loss.kind is LossKind.REPLACED:
                wait_s = self._options.max_backoff_s  # two gateways must not throw each other out in a circle
            log.warning(
                "worker_down",
                worker=self._spec.name,
                kind=str(loss.kind),
                detail=loss.detail,
                exit_code=loss.exit_code,
                signal=loss.signal,
                inflight=len(loss.inflight),
                restart_in_s=round(wait_s, 2),
            )
            self.handle = self._new_handle(self.handle.incarnation + 1)
            await asyncio.sleep(wait_s)

    async def _live(self, handle: WorkerHandle) -> WorkerLoss:
        """One worker from start to end."""
        try:
            process = await self._launcher.start(self._spec)
        except LaunchError as error:
            return self._lost(handle, WorkerLoss(LossKind.START_FAILED, str(error)))
        except Exception as error:  # a launcher is foreign code
            log.error("launcher_failed", worker=self._spec.name, exc_info=error)
            return self._lost(handle, WorkerLoss(LossKind.START_FAILED, type(error).__name__))
        self.address, self.foreign = process.address, process.pid is None
        tls = process.tls if isinstance(process, SecuredProcess) else None
        client = WorkerClient(process.address, process.secret, tls=tls)
        session = asyncio.create_task(self._converse(handle, client))
        exit_ = asyncio.create_task(process.wait())
        watch = asyncio.create_task(self._watch(handle))
        tasks: set[asyncio.Task[WorkerLoss] | asyncio.Task[WorkerExit]] = {session, exit_, watch}
        grace_s = self._options.stop_grace_s
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not watch.done():
                await asyncio.wait({session, exit_}, timeout=_LAST_OUTPUTS_S)
            loss = self._lost(handle, self._cause(session, exit_, watch))
            grace_s = 0.0
            return loss
        except asyncio.CancelledError:
            self._lost(handle, WorkerLoss(LossKind.STOPPED, "the gateway stops"))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await _to_the_end(self._end(tasks, process, client, grace_s))

    def _cause(
        self,
        session: asyncio.Task[WorkerLoss],
        exit_: asyncio.Task[WorkerExit],
        watch: asyncio.Task[WorkerLoss],
    ) -> WorkerLoss:
        """The most telling of what ended."""
        if watch.done():
            return watch.result()
        spoken = session.result() if session.done() else WorkerLoss(LossKind.DISCONNECTED)
        if not exit_.done() or spoken.kind is not LossKind.DISCONNECTED:
            return spoken
        if (failure := exit_.exception()) is not None:  # a launcher is foreign code
            log.error("launcher_failed", worker=self._spec.name, exc_info=failure)
            return spoken
        ended = exit_.result()
        kind = LossKind.EXITED if ended.signal is None else LossKind.SIGNALLED
        return WorkerLoss(kind, ended.last_words, ended.exit_code, ended.signal)

    async def _converse(self, handle: WorkerHandle, client: WorkerClient) -> WorkerLoss:
        """Read the worker's messages to the end of the stream."""
        try:
            await client.connect(self._options.start_timeout_s)
            await client.listen(partial(self._heard, handle, client))
        except _WrongWorkerError as error:
            return WorkerLoss(LossKind.PROTOCOL, str(error))
        except SessionError as error:
            return WorkerLoss(_KINDS.get(error.code, LossKind.DISCONNECTED), str(error))
        except Exception as error:  # nothing that one worker says may end the slot
            log.error("worker_session_failed", worker=self._spec.name, exc_info=error)
            return WorkerLoss(LossKind.PROTOCOL, type(error).__name__)
        return WorkerLoss(LossKind.DISCONNECTED, "the worker ended the session")

    def _heard(self, handle: WorkerHandle, client: WorkerClient, message: Up) -> None:
        """One message. Raises _WrongWorkerError."""
        if handle.state is WorkerState.DOWN:
            return
        if handle.hello is None or isinstance(message, Hello):
            wrong = self._greet(handle, client, message)
            if wrong is not None:
                raise _WrongWorkerError(wrong)
        elif isinstance(message, StepOutputs):
            handle.received(message)
            self._tell("on_outputs", partial(self._listener.on_outputs, handle, message))
        elif isinstance(message, AdapterAnswer):
            handle.adapters.answered(message)
        else:
            handle.purged(message)

    def _greet(self, handle: WorkerHandle, client: WorkerClient, message: Up) -> str | None:
        if not isinstance(message, Hello) or handle.hello is not None:
            return f"{type(message).__name__} out of turn: Hello comes first, and once"
        if message.protocol != PROTOCOL:
            return f"the worker speaks protocol {message.protocol}, this gateway {PROTOCOL}: run the same release"
        wrong = self._accept(message)
        if wrong is not None:
            return wrong
        handle.opened(client, with_fields(message, address=message.address or client.address))
        log.info(
            "worker_ready",
            worker=handle.name,
            pid=message.pid,
            device=message.device,
            dtype=message.dtype,
            blocks=message.blocks,
            max_running=message.max_running,
        )
        self._tell("on_ready", partial(self._listener.on_ready, handle))
        return None

    async def _watch(self, handle: WorkerHandle) -> WorkerLoss:
        """Returns when the worker does not start in time, or has work and makes no step."""
        began = self._clock()
        options = self._options
        while True:
            await asyncio.sleep(options.check_s)
            if handle.state is WorkerState.LOADING:
                if self._clock() - began > options.start_timeout_s:
                    return WorkerLoss(LossKind.START_FAILED, f"not ready within {options.start_timeout_s:g} s")
            elif handle.stalled_s() > options.step_stall_s:
                return WorkerLoss(LossKind.STALLED, f"work, but no step for {options.step_stall_s:g} s")
            elif handle.stale_s(self._clock()) > options.step_stall_s + options.silence_slack_s:
                return WorkerLoss(LossKind.STALLED, f"no report for {handle.stale_s(self._clock()):.0f} s")

    def _lost(self, handle: WorkerHandle, loss: WorkerLoss) -> WorkerLoss:
        if handle.state is WorkerState.DOWN:
            return handle.loss or loss
        was_ready = handle.hello is not None
        ended = loss.kind is LossKind.DISCONNECTED or (loss.kind is LossKind.EXITED and loss.exit_code == 0)
        if handle.state is WorkerState.DRAINING and ended and not handle.inflight:
            loss = WorkerLoss(LossKind.STOPPED, "drained", loss.exit_code)
        if not was_ready and loss.kind in (LossKind.EXITED, LossKind.SIGNALLED, LossKind.DISCONNECTED):
            loss = WorkerLoss(LossKind.START_FAILED, loss.detail, loss.exit_code, loss.signal)
        loss = self.last_loss = handle.closed(loss)
        if was_ready:
            self._tell("on_lost", partial(self._listener.on_lost, handle, loss))
        return loss

    async def _end(
        self,
        tasks: Iterable[asyncio.Task[Any]],
        process: WorkerProcess,
        client: WorkerClient,
        grace_s: float,
    ) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await client.close()
            await process.stop(grace_s)
        except Exception as error:  # a launcher is foreign code: its failure must not end the slot
            log.error("worker_stop_failed", worker=self._spec.name, exc_info=error)

    def _tell(self, event: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the dispatcher's bug; the worker goes on for everybody else
            log.error("pool_listener_failed", event_name=event, worker=self._spec.name, exc_info=error)

    def _was_stable(self, began: float) -> bool:
        return (
            self.last_loss is not None
            and self.handle.hello is not None
            and (self._clock() - began >= self._options.stable_s)
        )

    def _new_handle(self, incarnation: int) -> WorkerHandle:
        return WorkerHandle(
            self._spec.name,
            model=self._spec.model,
            pool=self._pool,
            labels=self._labels,
            classes=self._classes,
            incarnation=incarnation,
            clock=self._clock,
        )
