"""From start to exit code: listeners up, wait for a signal, drain, stop. Knows nothing of what is served.

Rules
- First SIGTERM or SIGINT: the service drains (it refuses new work at once and is not ready any more), then the
  listeners close, then the service stops; exit code 0. A second one ends it with 130, at once: what has not stopped
  within ``FORCED_S`` is left behind. That loses nothing but running requests: workers end when this process does, and
  what is durable survives a kill at any moment.
- SIGHUP calls the service's ``reload``; its failure is said and changes nothing.
- Listeners stay open while draining, so that a balancer reads the 503 of ``/readyz`` instead of a refused connection.
- Whatever fails, the service's ``stop`` runs: it owns child processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from gateway.cli.listener import Listener
from gateway.cli.output import say

FORCED = 130
STOP_S = 30.0
FORCED_S = 0.5
"""From the second signal to the end, whatever still runs."""


class Service(Protocol):
    """What runs behind the listeners."""

    async def start(self) -> None:
        """Begin; returns soon, the slow part goes on in the background."""
        ...

    async def drain(self) -> None:
        """Refuse new work from now on; return when the running work has ended or had its error event."""
        ...

    async def stop(self) -> None:
        """End children and background work. Called once, also after a failed start."""
        ...

    async def reload(self) -> object:
        """Read the configuration again. Raises when that fails; nothing has changed then."""
        ...


class _Signals:
    """Counts the signals to stop, and turns SIGHUP into a call."""

    def __init__(self, on_hangup: Callable[[], None]) -> None:
        self.stop = asyncio.Event()
        self.force = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)
        self._loop.add_signal_handler(signal.SIGHUP, on_hangup)

    def _stop(self) -> None:
        (self.force if self.stop.is_set() else self.stop).set()

    def release(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)


def _nothing() -> None:
    pass


async def run(
    service: Service,
    listeners: Sequence[Listener],
    on_up: Callable[[], None],
    on_forced: Callable[[], None] = _nothing,
) -> int:
    """Serve until told to stop; the exit code. ``on_up`` is called once the listeners accept connections, ``on_forced``
    (from a thread) before a process that does not stop is ended.

    The listeners come first, the service's start second: ``/healthz`` answers while models load.
    """
    reloads: set[asyncio.Task[None]] = set()

    def hangup() -> None:
        task = asyncio.create_task(_reload(service))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    signals = _Signals(hangup)
    patience = STOP_S
    try:
        for listener in listeners:
            await listener.start()
        on_up()
        await _unless(signals.stop, service.start())
        await signals.stop.wait()
        say("Stopping: running requests may finish. Once more to end at once.")
        forced = await _unless(signals.force, _wind_down(service, listeners))
        if forced:
            patience = FORCED_S
            _end_soon(on_forced)
            await asyncio.gather(*(listener.stop(force=True) for listener in listeners))
        return FORCED if forced else 0
    finally:
        for task in reloads:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.stop(), patience)
        signals.release()


def _end_soon(on_forced: Callable[[], None]) -> None:
    """End the process in ``FORCED_S`` unless it ends before: not even a stuck event loop or thread holds it."""

    def end() -> None:
        try:
            on_forced()
            logging.shutdown()
        finally:
            os._exit(FORCED)

    timer = threading.Timer(FORCED_S, end)
    timer.daemon = True
    timer.start()


async def _wind_down(service: Service, listeners: Sequence[Listener]) -> None:
    await service.drain()
    await asyncio.gather(*(listener.stop() for listener in listeners))


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await ``work``; cancel it and return True when ``event`` is set first."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        task.result()
        return False
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return True


async def _reload(service: Service) -> None:
    try:
        await service.reload()
    except Exception as error:
        # Whatever it is: the running configuration stays, and the person who sent SIGHUP reads why.
        say(f"Reload failed, nothing changed: {error}")
    else:
        say("Reloaded.")
