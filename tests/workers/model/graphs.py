"""Recorded decode steps without a GPU: what is launched again is the same computation on the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workers.model.graphs import DecodeGraphs
from workers.model.kv_cache import KvCache
from workers.model.loading import LoadedModel
from workers.model.runner import TorchRunner


def eager(model: LoadedModel, most: int) -> list[int]:
    """Have ``model``'s runner replay its decodes, up to ``most`` rows; the list gets the rows of every replay."""
    runner: Any = model.runner
    assert isinstance(runner, TorchRunner)
    old, replays = runner.cache, []

    def record(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = compute()

        def replay() -> None:
            replays.append(len(result))
            result.copy_(compute())

        return replay, result

    runner.cache = KvCache(model.config, old.blocks, old.block_size, old.data.dtype, old.data.device, scratch=True)
    with torch.inference_mode():
        runner._graphs = DecodeGraphs(
            runner.decoder,
            runner.cache,
            runner.attention,  # type: ignore[arg-type]
            most=most,
            longest=model.max_context,
            recorder=record,
        )
    return replays
