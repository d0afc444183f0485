"""The models that clients may ask for: their tokenizer, and what their workers said of themselves.

Rules
- A model is *ready* when its tokenizer is loaded and at least one worker is; the gateway itself is up long before.
- Files are resolved and the tokenizer is read in a thread: seconds of disk never stop the event loop.
- A model without a source has no tokenizer here: only upstreams run it, and lengths are estimated (``estimate.py``).
- Limits (context, blocks) are those of the workers that are connected, since these will run the job; before the first
  has said hello, those of the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gateway.access import model_refused
from gateway.adapters import Adapter, Adapters
from gateway.errors import adapter_not_found, model_not_found, unavailable
from gateway.settings import Model
from gateway.tenants import EffectiveTenant
from workers.protocol import Hello

if TYPE_CHECKING:
    from gateway.estimate import EstimatedTokenizer
    from workers.model_store import ModelFiles, Progress
    from workers.tokenizer import Tokenizer

T = TypeVar("T")

DEFAULT_CONTEXT = 4096
"""Context that is assumed while no worker has said its own and the YAML names none."""


@dataclass(slots=True)
class ModelHandle:
    """One model. Only ``load`` and the worker events change it; both run on the event loop."""

    config: Model
    created: int = field(default_factory=lambda: int(time.time()))
    files: ModelFiles | None = None
    _tokenizer: Tokenizer | EstimatedTokenizer | None = None
    _hellos: dict[str, Hello] = field(default_factory=dict)
    _telling: Hello | None = None
    """The one that knows most: an engine's before an upstream's, which knows nothing of revisions and blocks."""
    _upstreams: bool = False
    """Whether one of them is an upstream."""
    _longest: int = 0
    """What the one with most room holds."""

    @property
    def name(self) -> str:
        """What clients ask for."""
        return self.config.name

    @property
    def default_max_tokens(self) -> int:
        """Output length when a request names none."""
        return self.config.default_max_tokens

    @property
    def directory(self) -> Path | None:
        """Where its files are; None while they are not there, and for a model that only upstreams run."""
        return self.files.dir if self.files is not None else None

    def offers(self, endpoint: str) -> bool:
        """Whether a worker runs such requests. While none has come, those that every engine runs."""
        generates = endpoint != "embeddings"
        if not self._hellos or (generates and not self._upstreams):
            return generates
        return any(endpoint in hello.endpoints if hello.upstream else generates for hello in self._hellos.values())

    @property
    def hellos(self) -> list[Hello]:
        """What its connected workers told of themselves; the last one's word stays after it has gone."""
        return list(self._hellos.values())

    @property
    def loaded(self) -> bool:
        """Whether the tokenizer is there."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer | EstimatedTokenizer:
        """The tokenizer. Raises ApiError 503 while it is being loaded."""
        if self._tokenizer is None:
            raise unavailable(f"The model {self.name!r} is still being loaded.", "model_loading", retry_after_s=2.0)
        return self._tokenizer

    @property
    def revision(self) -> str:
        """What the prefix keys are made with: the workers' word for their weights, else the files'."""
        if self._telling is not None:
            return self._telling.model_revision
        return self.files.revision if self.files else ""

    @property
    def max_context(self) -> int:
        """Longest prompt + output in tokens that some worker can hold."""
        if self._hellos:
            return self._longest
        configured = [pool.engine.max_context for pool in self.config.pools if pool.engine.max_context]
        return max(configured, default=DEFAULT_CONTEXT)

    @property
    def block_size(self) -> int:
        """Tokens per block of the prefix keys."""
        if self._telling is not None:
            return self._telling.block_size
        return self.config.pools[0].engine.block_size

    def load(self, files: ModelFiles | None, tokenizer: Tokenizer | EstimatedTokenizer) -> None:
        """The files are there and the tokenizer is read."""
        self.files = files
        self._tokenizer = tokenizer

    def worker_up(self, worker: str, hello: Hello) -> None:
        """Note a worker's figures."""
        self._hellos[worker] = hello
        self._ask_again()

    def worker_gone(self, worker: str) -> None:
        """Forget a worker, unless it was the last: its figures are the best guess until the next one comes."""
        if len(self._hellos) > 1:
            self._hellos.pop(worker, None)
            self._ask_again()

    def _ask_again(self) -> None:
        self._telling = min(self._hellos.values(), key=lambda hello: hello.upstream, default=None)
        self._upstreams = any(hello.upstream for hello in self._hellos.values())
        self._longest = max((hello.longest for hello in self._hellos.values()), default=0)

    def describe(self) -> dict[str, Any]:
        """The ``/v1/models`` entry."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "forebay",
            "max_model_len": self.max_context,
        }


class Models:
    """All models by name."""

    def __init__(self, configs: Iterable[Model], adapters: Adapters | None = None) -> None:
        configs = list(configs)
        self.adapters = adapters or Adapters(configs)
        self._handles: Mapping[str, ModelHandle] = {config.name: ModelHandle(config) for config in configs}

    def __iter__(self) -> Iterator[ModelHandle]:
        return iter(self._handles.values())

    def get(self, name: str, tenant: EffectiveTenant) -> ModelHandle:
        """The model. Raises the same ApiError 404 for one that is unknown and one the tenant may not use.

        403 for one that the tenant may use, but not this caller of it.
        """
        handle = self._handles.get(name)
        if handle is None or not tenant.may_use(name):
            raise model_not_found(name)
        if (refusal := model_refused(name, tenant.grants)) is not None:
            raise refusal
        return handle

    def choose(self, name: str, tenant: EffectiveTenant) -> tuple[ModelHandle, Adapter | None]:
        """The model behind ``name``, and its adapter: the one that ``name`` is, or that this tenant's requests to the
        model use. Raises ApiError as ``get``; 404 for an adapter that is gone, 503 for one that is still being loaded.
        """
        if name in self._handles:
            handle, own = self.get(name, tenant), tenant.adapters.get(name)
            if own is None:
                return handle, None
            adapter = self.adapters.find(own, name)
            if adapter is None:
                raise adapter_not_found(own, name)
        else:
            adapter = self.adapters.find(name)
            if adapter is None or not any(map(tenant.may_use, adapter.names)):
                raise model_not_found(name)
            if (refusal := model_refused(adapter.name, tenant.grants, adapter.qualified)) is not None:
                raise refusal
            handle = self._handles[adapter.model]
        if adapter.digest is None:
            raise unavailable(
                f"The adapter {adapter.name!r} is still being loaded.", "model_loading", retry_after_s=2.0
            )
        return handle, adapter

    def handle(self, name: str) -> ModelHandle:
        """The model by a name the gateway itself knows. Raises KeyError."""
        return self._handles[name]

    def visible(self, tenant: EffectiveTenant) -> list[ModelHandle]:
        """The models that ``tenant`` may use, in the YAML's order."""
        return [
            handle
            for handle in self._handles.values()
            if tenant.may_use(handle.name) and model_refused(handle.name, tenant.grants) is None
        ]

    def described(self, tenant: EffectiveTenant) -> list[dict[str, Any]]:
        """``/v1/models``: the models that ``tenant`` may use, and their adapters."""
        adapters = [
            adapter
            for adapter in self.adapters
            if any(map(tenant.may_use, adapter.names))
            and model_refused(adapter.name, tenant.grants, adapter.qualified) is None
        ]
        return [
            *(handle.describe() for handle in self.visible(tenant)),
            *(adapter.describe(self._handles[adapter.model].max_context) for adapter in adapters),
        ]


async def load_model(handle: ModelHandle, base_dir: Path, progress: Progress | None = None) -> None:
    """Resolve the model's source and read its tokenizer, in a thread. Raises ModelStoreError or ValueError.

    ``progress`` is called from that thread while files are fetched and unpacked.
    """
    source = handle.config.source
    if source is None:
        from gateway.estimate import EstimatedTokenizer

        handle.load(None, EstimatedTokenizer())
        return
    files, tokenizer = await _in_daemon(lambda: _read(source, base_dir, progress))
    handle.load(files, tokenizer)


async def _in_daemon(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that keeps no process alive: fetching a model may take minutes, a stop may not."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=run, name="load model", daemon=True).start()
    return await future


def _read(source: str, base_dir: Path, progress: Progress | None) -> tuple[ModelFiles, Tokenizer]:
    from workers.model_store import resolve
    from workers.tokenizer import Tokenizer

    files = resolve(source, base_dir=base_dir, progress=progress)
    return files, Tokenizer.load(files.dir)
