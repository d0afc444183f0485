"""One rank's part of a model, loaded and ready: what rank 0 and the others do alike."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from workers.config import EngineConfig, kv_bytes_per_token
from workers.model.attention import AttentionBackend, AttentionShape, choose
from workers.model.budget import Beside, Budget, divide
from workers.model.config import ModelConfig
from workers.model.kv_cache import KvCache, block_count, make_cache
from workers.model.parallel.group import Group
from workers.model.parallel.ranks import SETTINGS
from workers.model.parallel.shards import ShardSource
from workers.model.parallel.split import Split, SplitError
from workers.model.quant.choice import rounding_at
from workers.model.quant.matrix import Quantised
from workers.model.registry import architecture
from workers.model.runner import Decoder
from workers.model.weights import SafetensorsSource, Weights


@dataclass(frozen=True, slots=True)
class Part:
    """A decoder that runs only together with the other ranks', its attention and its cache."""

    decoder: Decoder
    cache: KvCache
    attention: AttentionBackend
    weight_bytes: int
    passed_over: tuple[str, ...]


def device_of(first: torch.device, rank: int, ranks: int) -> torch.device:
    """The device of a rank: on CUDA one each, from the first on. Raises ValueError when there are too few."""
    if first.type != "cuda":
        return first
    begin, there = first.index or 0, torch.cuda.device_count()
    if begin + ranks > there:
        raise ValueError(
            f"engine.tensor_parallel x pipeline_parallel = {ranks} devices from {first} on are wanted, and {there} "
            f"CUDA devices are there; write {there - begin} or less"
        )
    return torch.device("cuda", begin + rank)


def plan(
    split: Split,
    engine: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_context: int,
    beside: Beside,
) -> Budget:
    """Divide a rank's memory. On a CPU the ranks share it. ``beside``: what else it holds. Raises KvCacheSizeError.

    ``engine.kv_cache`` is the bytes of all ranks together, ``auto`` what each has left.
    """
    if engine.blocks is None and engine.kv_cache != "auto":
        whole = split.whole
        per_token = kv_bytes_per_token(whole.layers, whole.kv_heads, whole.head_dim, dtype.itemsize, engine.kv_dtype)
        engine = engine.model_copy(update={"blocks": block_count(engine, per_token + beside.per_token)})
    share = split.width * split.stages if device.type == "cpu" else 1
    return divide(
        _counted(split),
        engine.model_copy(update={"cuda_graphs": False}),  # ranks record no steps
        device,
        dtype,
        max_context,
        beside,
        share=share,
        sampled=split.whole.vocab if split.rank == 0 else 0,
    )


def _counted(split: Split) -> ModelConfig:
    """The part with as many tables of the vocabulary as it has: a first or last stage one, those between none."""
    if split.first and split.last:
        return split.part
    return replace(split.part, tied=True, vocab=split.part.vocab if split.first or split.last else 0)


def together(budgets: list[Budget]) -> Budget:
    """All ranks' budgets as one: bytes added, as many blocks as all of them have."""
    sums = {one.name: sum(getattr(budget, one.name) for budget in budgets) for one in fields(Budget)}
    return Budget(**{**sums, "blocks": min(budget.blocks for budget in budgets)})


def build(
    split: Split,
    group: Group,
    directory: Path,
    engine: EngineConfig,
    target: str,
    blocks: int,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    fitted: str = "",
) -> Part:
    """Load the part. ``fitted``: where the rounding lies, if it was fitted (``quant/choice.py``).

    Raises ModelStoreError, KvCacheSizeError, SplitError, ValueError.
    """
    part = split.part
    made = decoder_class(part, target)
    whole = rounding_at(engine.weight_dtype, fitted)

    def rounding(name: str, weight: Tensor) -> Quantised:
        assert whole is not None
        return whole(split.stored(name) or name, weight)

    with SafetensorsSource(directory) as opened, torch.no_grad():
        weights = Weights(ShardSource(opened, split), dtype, device, rounding=whole and rounding)
        decoder = made(part, weights, min(max_context, blocks * engine.block_size), group)
        weights.close(frozenset({"lm_head.weight"} if part.tied else ()))
    shape = AttentionShape(part.heads, part.kv_heads, part.head_dim, dtype, engine.kv_dtype)
    chosen = choose(engine.attention, shape, device)
    cache = make_cache(part, blocks, engine.block_size, dtype, device, kv_dtype=engine.kv_dtype)
    return Part(decoder, cache, chosen.backend, decoder.weight_bytes(), chosen.passed_over)


def decoder_class(config: ModelConfig, target: str) -> type:
    """The decoder's class, if it can be split. Raises SplitError, ModelStoreError."""
    made: type = architecture(config.architecture, {config.architecture: target})
    if not getattr(made, "splits", False):
        raise SplitError(f"{SETTINGS}: {config.architecture} runs on one device only; leave them out")
    return made
