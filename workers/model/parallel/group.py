"""Tensors between ranks: ``torch.distributed`` over gloo (CPU) or NCCL (CUDA), without its process-wide state.

Rules
- Every operation ends within the group's timeout. What fails, fails for good: RunnerGoneError, since the other ranks'
  state is not known any more.
- gloo listens on loopback only; the ranks find each other through a file in a directory that only this user can enter.
- Everything here runs on the thread that runs steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.engine.plan import RunnerGoneError
from workers.model.parallel.place import nothing
from workers.model.parallel.split import Split

LOOPBACK = "127.0.0.1"
c10d: Any = dist
"""Its stubs lack most of what it offers."""


class Group:
    """The ranks as one of them sees them; ``place.Place`` for its decoder.

    Made by all ranks at once: the constructor waits for the others. Raises RunnerGoneError.
    """

    def __init__(self, split: Split, store: Path, device: torch.device, timeout_s: float) -> None:
        """``store``: a file for this group alone, which need not exist yet."""
        ranks = split.width * split.stages
        self.first, self.last = split.first, split.last
        self._split, self._device = split, device
        self._timeout = timedelta(seconds=timeout_s)
        with _fatal("joining"):
            files = c10d.FileStore(str(store), ranks)
            files.set_timeout(self._timeout)
            self._all = self._backend(c10d.PrefixStore("all", files), split.rank, ranks)
            self._stage = self._all
            if split.stages > 1 and split.width > 1:
                self._stage = self._backend(c10d.PrefixStore(f"stage{split.stage}", files), split.lane, split.width)

    def add(self, x: Tensor) -> Tensor:
        """As ``Place.add``."""
        if self._split.width > 1:
            with _fatal("adding"):
                self._stage.allreduce([x]).wait()
        return x

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """As ``Place.embed``: each token's row comes from the lane that has it."""
        own = tokens - self._split.lane * len(table)
        here = (own >= 0) & (own < len(table))
        rows = table[own.where(here, 0)]
        return self.add(rows.masked_fill_(~here[:, None], 0))

    def receive(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """As ``Place.receive``."""
        return self.take(self._split.rank - self._split.width, torch.empty(shape, dtype=like.dtype, device=like.device))

    def send(self, x: Tensor) -> None:
        """As ``Place.send``."""
        self.give(self._split.rank + self._split.width, x)

    def gather(self, logits: Tensor | None, rows: int) -> Tensor:
        """As ``Place.gather``."""
        split = self._split
        if split.rank:
            if logits is not None:
                self.give(0, logits)
            return nothing(self._like())
        part, start = split.part.vocab, split.width * (split.stages - 1)
        own = [] if logits is None else [logits]
        others = [
            self.take(rank, torch.empty(rows, part, dtype=torch.float32, device=self._device))
            for rank in range(start + len(own), start + split.width)
        ]
        return torch.cat(own + others, dim=1)[:, : split.whole.vocab]

    def give(self, rank: int, x: Tensor) -> None:
        """Send a tensor to a rank that takes one of the same shape and type."""
        with _fatal("sending"):
            self._all.send([x.to(self._device).contiguous()], rank, 0).wait()

    def take(self, rank: int, into: Tensor) -> Tensor:
        """Receive a tensor from a rank that gives one of this shape and type."""
        there = into.to(self._device)
        with _fatal("receiving"):
            self._all.recv([there], rank, 0).wait()
        return there.to(into.device)

    def close(self) -> None:
        """Leave. Whatever others still do with this rank fails."""
        for backend in {id(one): one for one in (self._stage, self._all)}.values():
            with contextlib.suppress(RuntimeError):
                backend.shutdown()

    def _like(self) -> Tensor:
        return torch.empty(0, device=self._device)

    def _backend(self, store: Any, rank: int, ranks: int) -> Any:
        if self._device.type == "cuda":
            nccl = c10d.ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            return c10d.ProcessGroupNCCL(store, rank, ranks, nccl)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout, options._threads = self._timeout, 1
        return c10d.ProcessGroupGloo(store, rank, ranks, options)


@contextlib.contextmanager
def _fatal(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed's errors and timeouts are RuntimeErrors
        raise RunnerGoneError(f"{what}: another rank ended or did not answer in time") from error
