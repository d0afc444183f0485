"""LoRA adapters by name: which content a name means now, who may ask for it, and how they come and go while all runs.

Rules
- An adapter's name is a model's name: unique in the gateway. ``<model>:<name>`` says the same.
- A name means one content (digest) at a time. A request takes the digest with it and runs only where exactly that is
  loaded; a name that is loaded again with other content changes nothing for requests that have begun.
- What was loaded or dropped through the admin API holds for every worker that comes later, until the gateway ends. The
  file is the truth at start.
- A request takes its adapter when it is resolved and gives it back at its end. A worker is told to let go of a content
  once nobody has it and no name means it; it frees the memory after its own last request.
- Belongs to the event loop; it is the only writer of the names.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway import log
from gateway.pool_listener import PoolListener
from gateway.settings import Model
from gateway.worker_handle import WorkerGoneError, WorkerHandle, WorkerState
from workers.protocol import AdapterInfo

_log = log.get("adapters")

LOAD_S = 120.0
"""How long a worker may take to read an adapter."""
DROP_S = 2.0
"""How long a caller of ``drop`` waits for its end; then it goes on by itself."""
MAX_PAST = 4096

Content = tuple[str, str]
"""Model and digest."""


class AdapterRefusedError(Exception):
    """An adapter that could not be loaded or dropped; nothing has changed. ``status``: 400, 404, 409 or 503."""

    def __init__(self, status: int, message: str, param: str) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a name means."""

    name: str
    model: str
    source: str
    digest: str | None = None
    """None: no worker has told yet."""
    rank: int = 0
    bytes: int = 0
    live: bool = False
    """Loaded through the admin API."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def qualified(self) -> str:
        """``<model>:<name>``."""
        return f"{self.model}:{self.name}"

    @property
    def names(self) -> tuple[str, str]:
        """By which it is asked for, and may be granted."""
        return self.name, self.qualified

    def describe(self, max_context: int) -> dict[str, Any]:
        """The ``/v1/models`` entry."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "forebay",
            "max_model_len": max_context,
            "parent": self.model,
        }


class Adapters:
    """All adapters of one gateway."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = {model.name: model for model in models}
        self._named: dict[str, Adapter] = {}
        for model in models:
            for pool in model.pools:
                for source in pool.engine.adapters:
                    self._named.setdefault(source.name, Adapter(source.name, model.name, source.source))
        self._dropped: set[tuple[str, str]] = set()
        """(model, name) of what was dropped or could not be loaded: a worker that comes with it has to let go of it."""
        self._past: dict[Content, None] = {}
        """(model, digest) of every content there was, the oldest first."""
        self._workers: dict[str, WorkerHandle] = {}
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._taken: Counter[Content] = Counter()
        self._given_back: dict[Content, asyncio.Event] = {}
        """Set when the last request that had a content is over; for those who wait for that."""

    # -- for requests ---------------------------------------------------------------------------------------------

    def find(self, name: str, model: str | None = None) -> Adapter | None:
        """The adapter called so, or ``<model>:<name>``; of ``model`` only, where that is given."""
        found = self._named.get(name)
        if found is None and ":" in name:
            found = self._named.get(name.rpartition(":")[2])
            if found is not None and found.qualified != name:
                return None
        return found if found is None or model in (None, found.model) else None

    def __iter__(self) -> Iterator[Adapter]:
        return iter(list(self._named.values()))

    def take(self, adapter: Adapter) -> None:
        """A request runs with it: its content stays where it is until ``give_back``."""
        if adapter.digest is not None:
            self._taken[adapter.model, adapter.digest] += 1

    def give_back(self, adapter: Adapter) -> None:
        """That request is over."""
        if adapter.digest is None:
            return
        key = adapter.model, adapter.digest
        self._taken[key] -= 1
        if self._taken[key] <= 0:
            del self._taken[key]
            if (event := self._given_back.pop(key, None)) is not None:
                event.set()

    def requests(self, adapter: Adapter) -> int:
        """How many run or wait with its content."""
        return 0 if adapter.digest is None else self._taken[adapter.model, adapter.digest]

    def contents(self, model: str) -> list[str]:
        """Digests of every content that requests of ``model`` may have left blocks of."""
        return [digest for owner, digest in self._past if owner == model]

    def workers(self, adapter: Adapter) -> list[str]:
        """Where it is loaded."""
        return sorted(
            handle.name for handle in self._workers.values() if adapter.digest in handle.adapters and _alive(handle)
        )

    # -- for the operator -----------------------------------------------------------------------------------------

    async def load(self, model: str, name: str, source: str) -> Adapter:
        """Load ``source`` under ``name`` on every worker of ``model`` that takes adapters; then the name means it.

        Where the name meant another content, requests that have begun keep that. Raises AdapterRefusedError: then the
        name means what it meant, and no worker keeps what was loaded in vain.
        """
        async with self._changing:
            old = self._named.get(name)
            if name in self._models or (old is not None and old.model != model):
                raise AdapterRefusedError(409, f"name: {name!r} is taken by a model or another model's adapter", "name")
            handles = self._able(model)
            told = await asyncio.gather(*(self._load_at(handle, name, source) for handle in handles))
            failed = [(handle, one) for handle, one in zip(handles, told, strict=True) if isinstance(one, _Failure)]
            infos = [one for one in told if isinstance(one, AdapterInfo)]
            if not failed and len({info.digest for info in infos}) > 1:
                failed = [(handles[0], _Failure("its files are not the same as on the other workers", 400))]
            if failed:
                for digest in {info.digest for info in infos}:
                    self._let_go(model, digest)
                if old is None:  # one that had not answered yet may say hello with it
                    self._dropped.add((model, name))
                handle, failure = failed[0]
                raise AdapterRefusedError(failure.status, f"{handle.name}: {failure.why}", "source")
            info = infos[0]
            new = Adapter(name, model, source, info.digest, info.rank, info.bytes, live=True)
            self._named[name] = new
            self._dropped.discard((model, name))
            self._remember(model, info.digest)
            if old is not None and old.digest is not None and old.digest != new.digest:
                self._let_go(model, old.digest)
            for handle in list(self._workers.values()):  # those that came meanwhile
                self._bring(handle, new)
            return new

    async def drop(self, name: str) -> tuple[Adapter, bool]:
        """Let go of ``name``: no new request finds it. Returns it, and whether every worker has freed it by now.

        Raises AdapterRefusedError 404.
        """
        async with self._changing:
            adapter = self.find(name)
            if adapter is None:
                raise AdapterRefusedError(404, f"There is no adapter {name[:128]!r}", "name")
            del self._named[adapter.name]
            self._dropped.add((adapter.model, adapter.name))
        if adapter.digest is None:
            return adapter, True
        task = self._let_go(adapter.model, adapter.digest)
        done, _ = await asyncio.wait({task}, timeout=DROP_S)
        return adapter, bool(done)

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- for the pools --------------------------------------------------------------------------------------------

    def listening(self, listener: PoolListener) -> PoolListener:
        """``listener``, to whom a worker is shown once its adapters are known here."""
        return _Listening(self, listener)

    def worker_up(self, handle: WorkerHandle) -> None:
        """A worker said hello: learn what it has, and have it load and drop what the others had to meanwhile."""
        hello = handle.hello
        if hello is None or hello.upstream:
            return
        self._workers[handle.name] = handle
        for info in hello.adapters:
            self._learn(handle, info)
        for adapter in list(self._named.values()):
            if adapter.live:
                self._bring(handle, adapter)

    def _learn(self, handle: WorkerHandle, info: AdapterInfo) -> None:
        known = self._named.get(info.name)
        foreign = info.name in self._models or (known is not None and known.model != handle.model)
        replaced = known is not None and known.live and known.digest != info.digest
        if foreign or replaced or (handle.model, info.name) in self._dropped:
            if not self._means(handle.model, info.digest):
                self._spawn(self._drop_at(handle, info.digest))
            return
        self._remember(handle.model, info.digest)
        if known is None:  # this gateway is younger than the worker
            source = f"(loaded at {handle.name})"
            self._named[info.name] = Adapter(info.name, handle.model, source, info.digest, info.rank, info.bytes)
        elif known.digest is None or not self.workers(known):
            self._named[info.name] = replace(known, digest=info.digest, rank=info.rank, bytes=info.bytes)
        elif known.digest != info.digest:
            _log.warning(
                "adapter_differs", worker=handle.name, adapter=info.name, loaded=info.digest, means=known.digest
            )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _able(self, model: str) -> list[WorkerHandle]:
        """Connected workers of ``model`` that take adapters. Raises AdapterRefusedError where there are none."""
        config = self._models.get(model)
        if config is None:
            raise AdapterRefusedError(404, f"model: {model[:128]!r} is not served here", "model")
        pools = {pool.name for pool in config.pools if pool.engine.adapter_room}
        if not pools:
            raise AdapterRefusedError(
                409, f"model: no pool of {model!r} takes adapters; set engine.adapter_memory, e.g. 256MiB", "model"
            )
        handles = [
            handle
            for handle in self._workers.values()
            if handle.model == model and handle.pool in pools and handle.state is WorkerState.READY
        ]
        if not handles:
            raise AdapterRefusedError(503, f"No worker of the model {model!r} that takes adapters is ready", "model")
        return handles

    def _bring(self, handle: WorkerHandle, adapter: Adapter) -> None:
        """Have a worker load what it lacks."""
        takes = any(p.name == handle.pool and p.engine.adapter_room for p in self._models[adapter.model].pools)
        if handle.model == adapter.model and takes and _alive(handle) and adapter.digest not in handle.adapters:
            self._spawn(self._catch_up(handle, adapter))

    async def _load_at(self, handle: WorkerHandle, name: str, source: str) -> AdapterInfo | _Failure:
        try:
            answer = await handle.adapters.load(name, source, LOAD_S)
        except TimeoutError:
            return _Failure(f"did not load it within {LOAD_S:g} s", 503)
        except WorkerGoneError:
            return _Failure("was lost meanwhile", 503)
        return answer.adapter if answer.adapter is not None else _Failure(answer.error or "did not load it", 400)

    async def _catch_up(self, handle: WorkerHandle, adapter: Adapter) -> None:
        """Load at a worker that came later what the others have."""
        told = await self._load_at(handle, adapter.name, adapter.source)
        if isinstance(told, _Failure):
            _log.error("adapter_not_loaded", worker=handle.name, adapter=adapter.name, why=told.why)
            return
        current = self._named.get(adapter.name)
        if current is None or current.digest != adapter.digest:  # it was dropped or loaded anew meanwhile
            self._let_go(adapter.model, told.digest)
        elif told.digest != adapter.digest and self.workers(adapter):
            _log.warning("adapter_differs", worker=handle.name, adapter=adapter.name, loaded=told.digest)
            self._let_go(adapter.model, told.digest)
        else:  # where nobody has the old content any more, the new one must do
            self._remember(adapter.model, told.digest)
            self._named[adapter.name] = replace(adapter, digest=told.digest, rank=told.rank, bytes=told.bytes)

    def _let_go(self, model: str, digest: str) -> asyncio.Task[None]:
        return self._spawn(self._retire(model, digest))

    async def _retire(self, model: str, digest: str) -> None:
        """Have every worker drop a content, once no name means it and no request of ours has it."""
        while self._taken[model, digest]:
            await self._given_back.setdefault((model, digest), asyncio.Event()).wait()
        if self._means(model, digest):
            return
        handles = [handle for handle in self._workers.values() if handle.model == model and digest in handle.adapters]
        await asyncio.gather(*(self._drop_at(handle, digest) for handle in handles if _alive(handle)))

    async def _drop_at(self, handle: WorkerHandle, digest: str) -> None:
        try:
            await handle.adapters.drop(digest)
        except WorkerGoneError:
            _log.info("adapter_gone_with_worker", worker=handle.name, digest=digest)

    def _means(self, model: str, digest: str) -> bool:
        return any(adapter.model == model and adapter.digest == digest for adapter in self._named.values())

    def _remember(self, model: str, digest: str) -> None:
        self._past[model, digest] = None
        if len(self._past) > MAX_PAST:
            del self._past[next(iter(self._past))]

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Listening:
    """Hears of new workers first."""

    def __init__(self, adapters: Adapters, listener: PoolListener) -> None:
        self._adapters = adapters
        self._listener = listener
        self.on_outputs = listener.on_outputs
        self.on_lost = listener.on_lost

    def on_ready(self, handle: WorkerHandle) -> None:
        self._adapters.worker_up(handle)
        self._listener.on_ready(handle)


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    status: int


def _alive(handle: WorkerHandle) -> bool:
    return handle.state in (WorkerState.READY, WorkerState.DRAINING)
