"""A model spread over ranks, as the engine sees it: one runner and one cache.

Rules
- What changes the ranks' caches or computes is told to all of them before it is done here, so that all do the same in
  the same order.
- Only rank 0 samples. The others learn which tokens came of it from the next step, as the model does.
- A rank 0 that leaves a step halfway has lost the others, which wait in it: RunnerGoneError.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.config import EngineConfig
from workers.engine.plan import Chunk, RunnerGoneError
from workers.model.attention import AttentionBackend
from workers.model.batch import Layout, lay_out
from workers.model.budget import Beside, Budget
from workers.model.config import ModelConfig
from workers.model.deltas import Deltas
from workers.model.kv_cache import KvCache, check_saved
from workers.model.parallel import part
from workers.model.parallel.group import Group
from workers.model.parallel.messages import Begin, Copy, Forward, Ready, Restore, Room, Save, Setup, Zero
from workers.model.parallel.ranks import SETTINGS, Ranks
from workers.model.parallel.seams import Seams
from workers.model.parallel.split import Split
from workers.model.runner import Decoder, TorchRunner


class SpreadCache(KvCache):
    """Everybody's cache: to attention it is rank 0's part, blocks are zeroed, copied, saved and restored everywhere."""

    def __init__(self, own: KvCache, ranks: Ranks, group: Group, seams: Seams) -> None:
        """``own``: rank 0's part. ``seams``: how the parts of a block make a whole."""
        self.blocks, self.block_size, self.data = own.blocks, own.block_size, own.data
        self.tables = own.tables
        self.block_bytes = seams.block_bytes
        self.bytes_per_token = self.block_bytes // self.block_size
        self._own, self._ranks, self._group, self._seams = own, ranks, group, seams

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """As rank 0's part has them; so the others that attention calls."""
        return self._own.rows(layer)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """As ``KvCache.pages``."""
        return self._own.pages(layer)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """As ``KvCache.write``."""
        self._own.write(layer, keys, values, slots)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As ``KvCache.gather``."""
        return self._own.gather(layer, slots)

    def kept(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As ``KvCache.kept``."""
        return self._own.kept(keys, values)

    def zero(self, blocks: list[int]) -> None:
        """As ``KvCache.zero``. Raises RunnerGoneError; so do the others below."""
        if blocks:
            self._ranks.tell(Zero(blocks))
            self._own.zero(blocks)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """As ``KvCache.copy``."""
        if pairs:
            self._ranks.tell(Copy(pairs))
            self._own.copy(pairs)

    def save(self, blocks: list[int]) -> Tensor:
        """As ``KvCache.save`` of an undivided model, to the byte."""
        if not blocks:
            return torch.empty(0, self.block_bytes, dtype=torch.uint8)
        self._ranks.tell(Save(blocks))
        others = enumerate(self._seams.sizes[1:], 1)
        kept = [self._own.save(blocks)]
        kept += [self._group.take(rank, torch.empty(len(blocks), size, dtype=torch.uint8)) for rank, size in others]
        return self._seams.join(kept)

    def restore(self, blocks: list[int], saved: Tensor) -> None:
        """As ``KvCache.restore``."""
        check_saved(saved, blocks, self.block_bytes)
        if not blocks:
            return
        self._ranks.tell(Restore(blocks))
        own, *others = self._seams.cut(saved)
        for rank, piece in enumerate(others, 1):
            self._group.give(rank, piece)
        self._own.restore(blocks, own)


class SpreadRunner(TorchRunner):
    """``TorchRunner`` of rank 0's part, which has the others run theirs."""

    def __init__(
        self, decoder: Decoder, cache: SpreadCache, attention: AttentionBackend, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__(decoder, cache, attention, device)
        self._ranks = ranks

    @torch.inference_mode()
    def logits(self, chunk: Chunk) -> Tensor:
        """As ``TorchRunner.logits``."""
        layout = lay_out([chunk], self.cache.block_size)
        layout.logit_rows = list(range(chunk.count))
        return self._forward(layout)

    def _forward(self, layout: Layout, deltas: Deltas | None = None) -> Tensor:
        assert deltas is None, "adapters are refused at start"
        self._ranks.tell(Forward.of(layout))
        try:
            return super()._forward(layout)
        except RunnerGoneError:
            raise
        except Exception as error:
            raise RunnerGoneError("rank 0 failed in a step that the other ranks are in") from error


@dataclass(frozen=True, slots=True)
class Spread:
    """What came of loading."""

    runner: SpreadRunner
    ranks: Ranks
    weight_bytes: int
    budget: Budget
    attention: str
    passed_over: tuple[str, ...]


def spread(
    config: ModelConfig,
    directory: Path,
    engine: EngineConfig,
    target: str,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    beside: Beside,
    fitted: str = "",
) -> Spread:
    """Start the other ranks and load everybody's part. Sets torch's thread count. ``beside``: on rank 0 alone.
    ``fitted``: as in ``part.build``.

    Raises SplitError for a model that does not divide, ValueError for what goes wrong on any rank.
    """
    count = engine.ranks
    split = Split.of(config, engine, 0)
    part.decoder_class(config, target)
    devices = [part.device_of(device, rank, count) for rank in range(count)]
    threads = engine.threads or max(1, torch.get_num_threads() // (count if device.type == "cpu" else 1))
    torch.set_num_threads(threads)
    ranks = Ranks(count - 1, threads, engine.rank_timeout_s)
    try:
        store = ranks.folder / "store"
        ranks.tell_each(
            [
                Setup(
                    rank,
                    str(directory),
                    engine.model_dump(mode="json"),
                    target,
                    str(store),
                    str(devices[rank]),
                    str(dtype).removeprefix("torch."),
                    max_context,
                    threads,
                    fitted,
                )
                for rank in range(1, count)
            ]
        )
        own = part.plan(split, engine, devices[0], dtype, max_context, beside)
        budget = part.together([own, *(Budget(**one.budget) for one in ranks.answers(Room))])
        ranks.tell(Begin(budget.blocks))
        try:
            group = Group(split, store, devices[0], engine.rank_timeout_s)
            ranks.at_end(group.close)
            made = part.build(
                split, group, directory, engine, target, budget.blocks, max_context, dtype, devices[0], fitted
            )
        except RunnerGoneError:
            ranks.blame(Ready)  # one that left while we were still joining said why
            raise
        ready = ranks.answers(Ready)
        if device.type == "cpu":  # NCCL looks into it later too
            ranks.joined()
    except BaseException as error:
        ranks.close()
        if isinstance(error, RunnerGoneError):
            raise ValueError(f"{SETTINGS}: {error}") from error
        raise
    seams = Seams.of(made.cache, split.part, config.layers, split.width, split.stages)
    assert seams.sizes == [made.cache.block_bytes, *(one.block_bytes for one in ready)]
    cache = SpreadCache(made.cache, ranks, group, seams)
    return Spread(
        SpreadRunner(made.decoder, cache, made.attention, devices[0], ranks),
        ranks,
        made.weight_bytes + sum(one.weight_bytes for one in ready),
        budget,
        f"{made.attention.name}, {count} ranks",
        made.passed_over,
    )
