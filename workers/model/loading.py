"""From a model source and an ``engine:`` block to a runner that is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from workers.adapters import LoadedAdapter
from workers.config import MEAN_REQUEST_TOKENS, EngineConfig
from workers.engine.adapters import AdapterTable
from workers.model.attention import AttentionShape, choose
from workers.model.budget import Beside, Budget, divide
from workers.model.config import ModelConfig, read_config
from workers.model.current import work_on
from workers.model.draft import DraftRunner
from workers.model.draft_loading import Draft
from workers.model.fitting import AdapterFitter, reject_adapters
from workers.model.graphs import CudaRecorder, DecodeGraphs, GraphBackend, most_rows
from workers.model.host_tier import HostTier
from workers.model.kv_cache import KvCacheSizeError, make_cache
from workers.model.kv_tables import KvTables, tables_of
from workers.model.native.adapters import low_width
from workers.model.native.build import NativeUnavailableError
from workers.model.native.decoder import NativeCache, NativeDecoder, unsupported
from workers.model.native.runner import NativeRunner
from workers.model.parallel.ranks import Ranks
from workers.model.parallel.spread import Spread, spread
from workers.model.quant.choice import digest_of, path_of, rounding_for
from workers.model.quant.scheme import none_quantised
from workers.model.quant.source import as_it_lies, open_gguf
from workers.model.registry import BUILTIN, architecture
from workers.model.runner import TorchRunner
from workers.model.tier_store import Store, open_store
from workers.model.weights import GgufSource, Rounding, SafetensorsSource, Weights
from workers.model.work import twice_at
from workers.model_store import ModelFiles, ModelStoreError, Progress, resolve

_NO_DRAFTS = (
    "engine.speculation.method=draft puts two models' keys and values under the same blocks, which {which} with a "
    "sliding window of {window} tokens has not; use method: ngram, or set engine.max_context: {window} (now {context})"
)
_NO_RANKS = (
    "engine.tensor_parallel={tensor} and pipeline_parallel={pipeline} cannot divide a model with sliding windows or "
    "norms behind its layers' parts; use 1 for both, and several workers instead (launch: {{count: 2}})"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and what the worker tells the gateway about it."""

    runner: TorchRunner | NativeRunner | DraftRunner
    config: ModelConfig
    eos_ids: frozenset[int]
    vocab_size: int
    max_context: int
    blocks: int
    block_size: int
    weight_bytes: int
    kv_bytes_per_token: int
    revision: str
    tokenizer_sha256: str
    device: str
    dtype: str
    attention: str
    """The backend in use; the native kernel also names its instruction set."""
    tables: KvTables
    """Which block tables a sequence has; a block holds the layers of one."""
    budget: Budget
    """How the memory was divided before loading."""
    kv_dtype: str = "float32"
    """What keys and values are kept in: ``dtype``, int8 or fp8."""
    weight_dtype: str = "float32"
    """What matrices are kept in: ``dtype``, int8, int4 or gguf."""
    device_name: str = ""
    """What a GPU calls itself."""
    adapters: AdapterTable | None = None
    """Those loaded at start; None: this engine takes none."""
    read_adapter: Callable[[str, str], LoadedAdapter] | None = None
    """(name, source) → an adapter that ``adapters`` may install. Any thread. Raises AdapterError."""
    store: Store | None = None
    """The tiers below the device."""
    fallback: str | None = None
    """Why ``auto`` did not take what it would rather have: the native kernel on a CPU, FlashInfer or Triton on CUDA."""
    ranks: Ranks | None = None
    """The other processes of a model on several devices."""
    numbers: str = ""
    """Names the weights that it computes with: ``revision``, and which rounding of them where that was fitted."""

    @property
    def windows(self) -> tuple[int, ...]:
        """By block table, how many latest tokens its layers attend to; 0 = all."""
        return self.tables.windows

    @property
    def twice_at(self) -> int:
        """At so many tokens of context a prompt's token takes twice as long as at the start (``work.py``)."""
        return twice_at(self.config, self.max_context)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values the cache holds at least: more where windows let blocks go."""
        return self.blocks // len(self.windows) * self.block_size

    @property
    def table(self) -> str:
        """The start-up figures as text, one per line."""
        lines = {
            "architecture": f"{self.config.architecture}, {self.config.layers} layers, context {self.max_context}",
            "runs on": f"{self.device}, {self.dtype}, attention {self.attention}",
            "weights": f"{self.weight_bytes:,} bytes, {self.weight_dtype}",
            "KV per token": f"{self.kv_bytes_per_token:,} bytes, {self.kv_dtype}",
            "KV cache": f"{self.cache_tokens * self.kv_bytes_per_token:,} bytes in {self.blocks:,} blocks of "
            f"{self.block_size}",
            "cache holds": f"{self.cache_tokens:,} tokens, about {self.cache_tokens // MEAN_REQUEST_TOKENS:,} requests "
            f"of {MEAN_REQUEST_TOKENS}",
            **{f"plan {name}": f"{value:,} bytes" for name, value in self.budget.figures().items()},
        }
        return "\n".join(f"{name:<18}{text}" for name, text in lines.items())


def load(
    source: str | Path | ModelFiles,
    engine: EngineConfig,
    *,
    base_dir: str | Path = ".",
    cache: Path | None = None,
    progress: Progress | None = None,
    architectures: Mapping[str, str] = BUILTIN,
    straight: bool = False,
) -> LoadedModel:
    """Load a model and make its runner. Takes seconds and memory for weights and KV cache.

    ``source`` as in ``model_store.resolve``, or its result. With ``straight`` a ``.gguf`` file is read as it lies,
    nothing is unpacked (slower, for a machine whose disk must not be written); the numbers are the same.
    Sets torch's thread count for the whole process. Raises ModelStoreError, KvCacheSizeError, or ValueError.
    """
    device = pick_device(engine.device)
    work_on(device)
    dtype = pick_dtype(engine, device)
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    opened: SafetensorsSource | GgufSource
    if straight:
        if isinstance(source, ModelFiles) or not str(source).endswith(".gguf"):
            raise ModelStoreError(f"model source {source!r} cannot be read straight: that is for .gguf files")
        files, config, opened = open_gguf(Path(base_dir) / source, cache)
    else:
        files = (
            source
            if isinstance(source, ModelFiles)
            else resolve(source, base_dir=base_dir, cache=cache, progress=progress)
        )
        config = read_config(files.dir)
        opened = as_it_lies(files, cache) if engine.weight_dtype == "gguf" else SafetensorsSource(files.dir)
    max_context = min(engine.max_context or config.max_context, config.max_context)
    if engine.max_context and engine.max_context > config.max_context:
        raise ValueError(
            f"engine.max_context={engine.max_context} exceeds the model's own limit {config.max_context}: lower it or "
            "leave it out"
        )
    if engine.adapter_room:
        reject_adapters(engine, config, architectures)
    draft = Draft.find(engine, files.dir, config, base_dir=base_dir, cache=cache, progress=progress)
    tables = tables_of(config, max_context)
    if draft is not None and tables.windows != (0,):
        raise ValueError(_NO_DRAFTS.format(which="the model", window=max(tables.windows), context=max_context))
    moved = [name for name, asked in (("tiers", engine.tiers), ("role", engine.role != "both")) if asked]
    if moved and tables.windows != (0,):
        raise ValueError(
            f"engine.{moved[0]} moves prefixes of models with one block table, which one with a sliding window of "
            f"{max(tables.windows)} tokens has not; leave it out, or set engine.max_context to the window or less"
        )
    if engine.ranks > 1 and (config.windows or config.post_norms):
        raise ValueError(_NO_RANKS.format(tensor=engine.tensor_parallel, pipeline=engine.pipeline_parallel))
    beside = draft.beside(engine, dtype) if draft is not None else Beside()
    fewer = rounding_for(engine, config, files, opened, architectures, device, cache)
    if engine.ranks == 1:
        made = _alone(engine, config, opened, max_context, dtype, device, architectures, beside, tables, fewer)
    elif straight:
        raise ValueError("a GGUF file is not read straight onto several devices; let it be unpacked")
    else:
        target, at = architectures.get(config.architecture, ""), path_of(fewer)
        made = _several(spread(config, files.dir, engine, target, max_context, dtype, device, beside, at), device)
    fitter = AdapterFitter(config, engine, made.runner, dtype, device, base_dir) if engine.adapter_room else None
    cache_made, host_tier = made.runner.cache, engine.host_tier
    if host_tier is not None:
        made.runner.host = HostTier(host_tier.size, cache_made.block_bytes)
    store = open_store(
        engine,
        made.runner.host,
        revision=files.revision + digest_of(fewer),
        layout=type(cache_made).__name__,
        dtype=str(dtype),
        base_dir=base_dir,
    )
    model = LoadedModel(
        runner=made.runner,
        config=config,
        eos_ids=config.eos_ids,
        vocab_size=config.vocab,
        max_context=max_context,
        blocks=made.budget.blocks,
        block_size=engine.block_size,
        weight_bytes=made.weight_bytes,
        kv_bytes_per_token=made.runner.cache.bytes_per_token * tables.count,
        revision=files.revision,
        tokenizer_sha256=files.tokenizer_sha256,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=made.attention,
        tables=tables,
        budget=made.budget,
        kv_dtype=str(dtype).removeprefix("torch.") if engine.kv_dtype == "auto" else engine.kv_dtype,
        weight_dtype=str(dtype).removeprefix("torch.") if engine.weight_dtype == "auto" else engine.weight_dtype,
        device_name=device_name(device),
        adapters=fitter.table() if fitter is not None else None,
        read_adapter=fitter.read if fitter is not None else None,
        store=store,
        fallback=made.passed_over if engine.attention == "auto" else None,
        ranks=made.ranks,
        numbers=files.revision + digest_of(fewer),
    )
    if draft is None:
        return model

    def small(source: ModelFiles, alone: EngineConfig) -> LoadedModel:
        loaded = load(source, alone, architectures=architectures)
        if loaded.windows != (0,):
            window, context = max(loaded.windows), loaded.max_context
            raise ValueError(_NO_DRAFTS.format(which="the draft model", window=window, context=context))
        return loaded

    return draft.join(model, engine, small)


@dataclass(frozen=True, slots=True)
class _Made:
    runner: TorchRunner | NativeRunner
    weight_bytes: int
    attention: str
    budget: Budget
    passed_over: str | None = None
    ranks: Ranks | None = None


def _alone(
    engine: EngineConfig,
    config: ModelConfig,
    opened: SafetensorsSource | GgufSource,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    architectures: Mapping[str, str],
    beside: Beside,
    tables: KvTables,
    fewer: Rounding | None,
) -> _Made:
    """On one device: in the kernel where it can, else in torch."""
    with opened, torch.no_grad():
        keep = engine.weight_dtype == "gguf"
        known = opened.kept_bytes(dtype.itemsize) if keep and isinstance(opened, GgufSource) else None
        budget = divide(config, engine, device, dtype, max_context, beside, known, tables)
        reach = tables.reach(budget.blocks, engine.block_size, max_context)
        reason = _why_not_native(engine, config, architectures.get(config.architecture), dtype, device)
        weights, made = Weights(opened, dtype, device, fresh=False, rounding=fewer, keep=keep), None
        if reason is None:
            try:
                made = _native(engine, config, weights, reach, budget, dtype, tables)
            except NativeUnavailableError as error:
                reason = str(error)
        if made is None and engine.attention == "native":
            raise ValueError(f"engine.attention=native cannot be used: {reason}; auto takes what runs")
        if made is None:
            weights = Weights(opened, dtype, device, rounding=fewer, keep=keep)
            made = _torch(engine, config, weights, reach, budget, dtype, device, architectures, tables)
        weights.close(frozenset({"lm_head.weight"} if config.tied else ()))
        if engine.weight_dtype != "auto" and not weights.quantised:
            raise ValueError(none_quantised(engine.weight_dtype, config.architecture))
    return replace(made, passed_over=reason) if device.type == "cpu" else made


def _several(made: Spread, device: torch.device) -> _Made:
    """On several."""
    passed = made.passed_over if device.type != "cpu" else ("several devices run in torch only",)
    return _Made(made.runner, made.weight_bytes, made.attention, made.budget, "; ".join(passed) or None, made.ranks)


def _why_not_native(
    engine: EngineConfig, config: ModelConfig, target: str | None, dtype: torch.dtype, device: torch.device
) -> str | None:
    if engine.attention not in ("auto", "native"):
        return f"engine.attention={engine.attention}"
    if target != BUILTIN["LlamaForCausalLM"]:
        return f"architecture {config.architecture} runs in torch only"
    return unsupported(config, engine.block_size, dtype, device, engine.kv_dtype)


def _native(
    engine: EngineConfig,
    config: ModelConfig,
    weights: Weights,
    max_context: int,
    budget: Budget,
    dtype: torch.dtype,
    tables: KvTables,
) -> _Made:
    cache = NativeCache(config, budget.blocks, engine.block_size, dtype, engine.kv_dtype, tables)
    low = low_width(engine.max_adapter_rank) if engine.adapter_room else 0
    threads = torch.get_num_threads()
    decoder = NativeDecoder(
        config, weights, max_context, cache, dtype, threads, low_width=low, folds=engine.fold_weights
    )
    return _Made(NativeRunner(decoder, cache), decoder.weight_bytes(), f"native ({decoder.isa})", budget)


def _torch(
    engine: EngineConfig,
    config: ModelConfig,
    weights: Weights,
    max_context: int,
    budget: Budget,
    dtype: torch.dtype,
    device: torch.device,
    architectures: Mapping[str, str],
    tables: KvTables,
) -> _Made:
    decoder = architecture(config.architecture, architectures)(config, weights, max_context)
    chosen = choose(engine.attention, AttentionShape.of(config, tables, dtype, engine.kv_dtype), device)
    attention = chosen.backend
    # Which experts have rows is asked of the device in every step, which no recording does.
    able = hasattr(attention, "hold") and config.moe is None
    recorded = device.type == "cuda" and engine.cuda_graphs and able
    cache = make_cache(
        config,
        budget.blocks,
        engine.block_size,
        dtype,
        device,
        kv_dtype=engine.kv_dtype,
        scratch=recorded,
        tables=tables,
    )
    graphs = None
    if recorded:
        with torch.inference_mode():
            graphs = DecodeGraphs(
                decoder,
                cache,
                cast(GraphBackend, attention),
                most=most_rows(engine),
                longest=max_context,
                recorder=CudaRecorder(device),
            )
    runner = TorchRunner(decoder, cache, attention, device, graphs)
    if device.type == "cuda":
        runner.warm_up()
    name = f"{attention.name}, recorded up to {graphs.most} rows" if graphs is not None else attention.name
    return _Made(runner, decoder.weight_bytes(), name, budget, "; ".join(chosen.passed_over) or None)


def pick_device(wanted: str) -> torch.device:
    """``auto``: CUDA if there is one. Raises ValueError when a named device is not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine.device={wanted} is not there: {torch.cuda.device_count()} CUDA devices found; write auto or cpu"
        )
    return device


def device_name(device: torch.device) -> str:
    """What a GPU calls itself; nothing for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def pick_dtype(engine: EngineConfig, device: torch.device) -> torch.dtype:
    """``auto``: fp32 for the reference backend; else bfloat16 where the hardware computes in it, else fp32."""
    if engine.dtype != "auto":
        return DTYPES[engine.dtype]
    if engine.attention == "reference":
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") else torch.float32


__all__ = ["KvCacheSizeError", "LoadedModel", "device_name", "load", "pick_device", "pick_dtype"]
