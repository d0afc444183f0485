"""Adapters that come and go while a worker serves: read aside, handed to the engine, answered. No torch.

Rules
- Files are read in one thread of their own, one adapter after the other; the engine's steps go on meanwhile. The engine
  thread then decides, and takes it in between two steps.
- Every ``LoadAdapter`` and ``DropAdapter`` is answered once, unless the session ends before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from workers.adapters import AdapterError, LoadedAdapter
from workers.engine.adapters import Install, Remove
from workers.log import get
from workers.protocol import AdapterAnswer, AdapterInfo, DropAdapter, LoadAdapter

MAX_ERROR_CHARS = 1000

log = get("worker")


def told(adapter: LoadedAdapter) -> AdapterInfo:
    """As the gateway hears of it."""
    return AdapterInfo(adapter.name, adapter.digest, adapter.rank, adapter.bytes)


class AdapterDesk:
    """One worker's. ``close`` ends its thread."""

    def __init__(
        self,
        read: Callable[[str, str], LoadedAdapter] | None,
        submit: Callable[[Install | Remove], None],
        answer: Callable[[AdapterAnswer], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``read(name, source)`` raises AdapterError; None: this worker takes none. ``submit``: to the engine.
        ``answer``: to the gateway. ``changed``: what is loaded is another set now. All from any thread."""
        self._read = read
        self._submit = submit
        self._answer = answer
        self._changed = changed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def take(self, message: LoadAdapter | DropAdapter) -> None:
        """Begin what the gateway asks for; returns at once."""
        if isinstance(message, DropAdapter):
            self._submit(Remove(message.digest, lambda: self._dropped(message)))
        else:
            self._thread.submit(self._load, message)

    def close(self) -> None:
        """End the thread after the adapter that is being read."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _load(self, message: LoadAdapter) -> None:
        try:
            if self._read is None:
                raise AdapterError("this worker takes no adapters: give its pool engine.adapter_memory")
            adapter = self._read(message.name, message.source)
        except AdapterError as error:
            self._failed(message, str(error))
        except Exception as error:  # files may be malformed in any way; whatever they provoke, the worker goes on
            log.error("adapter_load_failed", adapter=message.name, exc_info=error)
            self._failed(
                message, f"reading the adapter failed with {type(error).__name__}; the worker's log says where"
            )
        else:
            self._submit(Install(adapter, lambda refused: self._installed(message, adapter, refused)))

    def _installed(self, message: LoadAdapter, adapter: LoadedAdapter, refused: str | None) -> None:
        if refused is not None:
            self._failed(message, refused)
            return
        log.info("adapter_loaded", adapter=adapter.name, digest=adapter.digest, rank=adapter.rank, bytes=adapter.bytes)
        self._changed()
        self._answer(AdapterAnswer(message.id, adapter=told(adapter)))

    def _dropped(self, message: DropAdapter) -> None:
        log.info("adapter_dropped", digest=message.digest)
        self._changed()
        self._answer(AdapterAnswer(message.id))

    def _failed(self, message: LoadAdapter, why: str) -> None:
        log.warning("adapter_refused", adapter=message.name, why=why[:MAX_ERROR_CHARS])
        self._answer(AdapterAnswer(message.id, error=why[:MAX_ERROR_CHARS]))
