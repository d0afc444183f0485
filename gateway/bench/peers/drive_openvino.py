"""OpenVINO GenAI in this process (``ContinuousBatchingPipeline``), on a GGUF or a converted model's folder."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from gateway.bench.load import Request
from gateway.bench.peers.wire import Settings
from gateway.bench.pump import News

PRECISIONS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


class Openvino:
    """A ``wire.Driven``."""

    def __init__(self, model: str, settings: Settings) -> None:
        genai: Any = importlib.import_module("openvino_genai")
        openvino: Any = importlib.import_module("openvino")
        numpy: Any = importlib.import_module("numpy")
        self._genai, self._tensor, self._array, self._int64 = genai, openvino.Tensor, numpy.array, numpy.int64
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = settings.max_running
        scheduler.enable_prefix_caching = settings.prefix_cache
        scheduler.dynamic_split_fuse = True
        if settings.max_step_tokens is not None:
            scheduler.max_num_batched_tokens = settings.max_step_tokens
        scheduler.num_kv_blocks = -(-settings.kv_tokens // 32)  # its CPU blocks hold 32 tokens
        precision = PRECISIONS[settings.dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # its own default is 8 bits
            "INFERENCE_NUM_THREADS": settings.threads,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._handles: dict[int, tuple[Request, Any, int]] = {}
        self._next = 0

    def submit(self, request: Request) -> None:
        """Greedy; end tokens do not stop it."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.min_new_tokens = request.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = self._tensor(self._array([request.tokens], dtype=self._int64))
        handle = self._pipeline.add_request(self._next, ids, config)
        self._handles[self._next] = (request, handle, 0)
        self._next += 1

    def step(self) -> list[News]:
        """One pipeline step; what each handle can tell afterwards."""
        self._pipeline.step()
        news = []
        for key, (request, handle, seen) in list(self._handles.items()):
            tokens: list[int] = []
            while handle.can_read():
                tokens += [token for output in handle.read().values() for token in output.generated_ids]
            if tokens:
                total = seen + len(tokens)
                finished = total >= request.max_tokens
                if finished:
                    del self._handles[key]
                else:
                    self._handles[key] = (request, handle, total)
                news.append(News(request.id, tokens, finished))
        return news

    def versions(self) -> dict[str, str]:
        """The two packages' versions."""
        return {name: importlib.metadata.version(name) for name in ("openvino", "openvino-genai")}


def open_engine(model: str, settings: Settings) -> Openvino:
    """Load; it compiles its graph, which takes seconds."""
    return Openvino(model, settings)
