"""A stand-in for a model that was never in 4 bits: each 4-bit weight of a GGUF file moved at random within its cell.

A weight on a grid of sixteen is any number that was rounded to it, so one drawn evenly from its cell is as likely the
one that was there before. Rounding such a model anew costs what rounding costs, where the file's own grid, found
again, costs nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.model.gguf_unpack import GgufModel
from workers.model.quant.matrix import GROUP, Quantised
from workers.model.weights import GgufSource
from workers.model_store import ModelFiles


def write(files: ModelFiles, to: Path, seed: int = 0) -> Path:
    """A directory like ``files.dir`` whose 4-bit matrices are moved (bfloat16), and all else is as it was."""
    assert files.gguf is not None
    to.mkdir(parents=True)
    for path in files.dir.iterdir():
        if path.suffix == ".json" and path.name != "forebay.json" and "safetensors" not in path.name:
            (to / path.name).symlink_to(path)
    source, generator = GgufSource(GgufModel(files.gguf)), torch.Generator().manual_seed(seed)
    tensors = {}
    for name in sorted(source.names()):
        made = source.quantised(name)
        coarse = made is not None and made.format.bits == 4
        tensors[name] = _moved(made, generator) if made is not None and coarse else source.read(name)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def _moved(made: Quantised, generator: torch.Generator) -> Tensor:
    step, _ = made.format.scales(*made.parts)
    step = step.repeat_interleave(GROUP, 1)[:, : made.columns]
    return (made.dense(torch.float32) + step * (torch.rand(made.shape, generator=generator) - 0.5)).bfloat16()
