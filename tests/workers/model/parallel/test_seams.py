"""A block cut into ranks' parts and put together again, checked against plain slices."""

from __future__ import annotations

import pytest
import torch

from workers.model.parallel.seams import Seams
from workers.model.parallel.split import span

LAYERS, SIZE, HEADS, DIM = 5, 4, 6, 8


@pytest.mark.parametrize(("width", "stages"), [(1, 1), (2, 1), (3, 2), (1, 5), (6, 3)])
@pytest.mark.parametrize("scale", [0, 2])
def test_parts_are_heads_and_layers(width: int, stages: int, scale: int) -> None:
    """``scale``: bytes behind a row's numbers for each head, as a quantised cache has them."""
    numbers = torch.randint(256, (3, LAYERS, 2, SIZE, HEADS, DIM), dtype=torch.uint8)
    scales = torch.randint(256, (3, LAYERS, 2, SIZE, HEADS, scale), dtype=torch.uint8)
    whole = torch.cat((numbers.flatten(4), scales.flatten(4)), dim=-1).flatten(1)
    heads = HEADS // width
    seams = Seams(LAYERS, width, stages, SIZE, tuple(heads * part for part in (DIM, scale) if part))
    parts = seams.cut(whole)
    assert seams.block_bytes == whole.shape[1]
    assert [part.shape[1] for part in parts] == seams.sizes
    for rank, part in enumerate(parts):
        run, first = span(LAYERS, rank // width, stages), rank % width * heads
        own = [field[:, run.start : run.stop, :, :, first : first + heads].flatten(4) for field in (numbers, scales)]
        assert torch.equal(part, torch.cat(own, dim=-1).flatten(1))
        assert part.is_contiguous()
    assert torch.equal(seams.join(parts), whole)
