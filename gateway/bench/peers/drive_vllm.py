"""vLLM in this process (``LLMEngine``, no server and no second process between us and its steps)."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import Any

from gateway.bench.load import Request
from gateway.bench.peers.wire import Settings
from gateway.bench.pump import News

BYTES_PER_TOKEN_GUESS = 23_040
"""vLLM on a CPU takes whole GiB for its cache; this only has to be large enough."""


class Vllm:
    """A ``wire.Driven``."""

    def __init__(self, model: str, settings: Settings) -> None:
        gib = -(-settings.kv_tokens * BYTES_PER_TOKEN_GUESS // 2**30)
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE=os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(gib)),
            VLLM_CPU_OMP_THREADS_BIND=os.environ.get("VLLM_CPU_OMP_THREADS_BIND", f"0-{settings.threads - 1}"),
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        vllm: Any = importlib.import_module("vllm")
        kinds: Any = importlib.import_module("vllm.sampling_params")
        self._params, self._delta = vllm.SamplingParams, kinds.RequestOutputKind.DELTA
        options: dict[str, Any] = {
            "model": model,
            "dtype": settings.dtype,
            "max_num_seqs": settings.max_running,
            "max_model_len": settings.max_context,
            "enable_prefix_caching": settings.prefix_cache,
            "disable_log_stats": True,
            "skip_tokenizer_init": True,
        }
        if settings.max_step_tokens is not None:
            options["max_num_batched_tokens"] = settings.max_step_tokens
        self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**options))

    def submit(self, request: Request) -> None:
        """Greedy; end tokens do not stop it."""
        params = self._params(
            temperature=0.0,
            max_tokens=request.max_tokens,
            n=request.n,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._delta,
        )
        self._engine.add_request(request.id, {"prompt_token_ids": list(request.tokens)}, params)

    def step(self) -> list[News]:
        """One engine step."""
        return [
            News(
                output.request_id,
                [token for choice in output.outputs for token in choice.token_ids],
                output.finished,
                cached=output.num_cached_tokens,
            )
            for output in self._engine.step()
        ]

    def versions(self) -> dict[str, str]:
        """vLLM's and torch's."""
        names = ("vllm", "vllm-cpu", "torch")
        found = {name: _version(name) for name in names}
        return {name: version for name, version in found.items() if version}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def open_engine(model: str, settings: Settings) -> Vllm:
    """Load; takes a minute, since it compiles its graph."""
    return Vllm(model, settings)
