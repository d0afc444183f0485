"""llama.cpp in this process, through the C functions that llama-cpp-python exposes.

The library has batches and sequences but no scheduler; its server does in its own loop what is done here, by the same
rules: slots that keep the keys and values of their last request; a new request in the free slot with the longest common
beginning, else the one unused for longest; each step the tokens of all that decode, then prompt tokens up to a batch.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gateway.bench.load import Request
from gateway.bench.peers.wire import Settings
from gateway.bench.pump import News

DEFAULT_BATCH = 2048
"""llama-server's own."""
MAX_SEQUENCES = 256
"""What the library is built for."""


@dataclass(slots=True)
class Slot:
    """One sequence of the library's context."""

    number: int
    held: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the context."""
    request: Request | None = None
    known: list[int] = field(default_factory=list)
    """Prompt and answer so far."""
    cached: int = 0
    used: int = 0
    """When it last began a request."""


class Llama:
    """A ``wire.Driven``."""

    def __init__(self, model: str, settings: Settings) -> None:
        if settings.max_running > MAX_SEQUENCES:
            raise ValueError(f"max_running={settings.max_running} is above the {MAX_SEQUENCES} sequences of llama.cpp")
        self._lib: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        self._settings = settings
        self._budget = settings.max_step_tokens or DEFAULT_BATCH
        lib = self._lib
        self._quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        params = lib.llama_context_default_params()
        params.n_ctx = _cells(settings)
        params.n_batch = self._budget
        params.n_ubatch = min(self._budget, 512)
        params.n_seq_max = settings.max_running
        params.n_threads = params.n_threads_batch = settings.threads
        params.kv_unified = False
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context of these sizes")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(self._budget, 0, 1)
        self._slots = [Slot(number) for number in range(settings.max_running)]
        self._waiting: deque[Request] = deque()
        self._begun = 0

    def submit(self, request: Request) -> None:
        """Greedy; end tokens do not stop it."""
        if request.n != 1:
            raise ValueError("n > 1 is not driven on llama.cpp")
        self._waiting.append(request)

    def step(self) -> list[News]:
        """Fill a batch, decode it, take the likeliest token of every row that asked for one."""
        self._admit()
        rows = self._fill()
        if not self._batch.n_tokens:
            return []
        while (code := self._lib.llama_decode(self._context, self._batch)) == 1 and self._forget():
            pass  # no room: the oldest idle slot's past has gone, so try again
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return [self._take(slot, row) for slot, row in rows]

    def _admit(self) -> None:
        free = [slot for slot in self._slots if slot.request is None]
        while self._waiting and free:
            request = self._waiting.popleft()
            tokens = list(request.tokens)
            slot = max(free, key=lambda slot: (_common(slot.held, tokens), -slot.used))
            free.remove(slot)
            kept = min(_common(slot.held, tokens), len(tokens) - 1) if self._settings.prefix_cache else 0
            self._lib.llama_memory_seq_rm(self._memory, slot.number, kept, -1)
            self._begun += 1
            slot.request, slot.known, slot.cached, slot.used = request, tokens, kept, self._begun
            del slot.held[kept:]

    def _fill(self) -> list[tuple[Slot, int]]:
        """Lay out the batch; the slots that sample, each with its row."""
        batch = self._batch
        batch.n_tokens = 0
        rows: list[tuple[Slot, int]] = []
        active = [slot for slot in self._slots if slot.request is not None]
        active.sort(key=lambda slot: (len(slot.known) - len(slot.held) > 1, slot.used))  # those that decode first
        for slot in active:
            count = min(len(slot.known) - len(slot.held), self._budget - batch.n_tokens)
            if count < 1:
                break
            start = len(slot.held)
            for position in range(start, start + count):
                row = batch.n_tokens
                batch.token[row] = slot.known[position]
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = slot.number
                batch.logits[row] = position == len(slot.known) - 1
                batch.n_tokens = row + 1
            slot.held += slot.known[start : start + count]
            if len(slot.held) == len(slot.known):
                rows.append((slot, batch.n_tokens - 1))
        return rows

    def _take(self, slot: Slot, row: int) -> News:
        request = slot.request
        assert request is not None
        logits = self._lib.llama_get_logits_ith(self._context, row)
        token = int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())
        slot.known.append(token)
        finished = len(slot.known) - len(request.tokens) >= request.max_tokens
        if finished:
            slot.request = None
        return News(request.id, [token], finished, cached=slot.cached)

    def _forget(self) -> bool:
        """Drop the past of the idle slot that was unused for longest; False when there is none."""
        idle = [slot for slot in self._slots if slot.request is None and slot.held]
        if not idle:
            return False
        slot = min(idle, key=lambda slot: slot.used)
        self._lib.llama_memory_seq_rm(self._memory, slot.number, -1, -1)
        slot.held = []
        return True

    def versions(self) -> dict[str, str]:
        """The binding's version names the library's."""
        return {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}


def _cells(settings: Settings) -> int:
    """A sequence's cells times the sequences: attention reads all cells of a stream that are in use, so that one stream
    for everybody (``kv_unified``) would make each token pay for the others' contexts, as it does not in the server.
    """
    return -(-settings.max_context // 256) * 256 * settings.max_running


def _common(held: list[int], tokens: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), min(len(held), len(tokens)))


def open_engine(model: str, settings: Settings) -> Llama:
    """Load; takes a second."""
    return Llama(model, settings)
